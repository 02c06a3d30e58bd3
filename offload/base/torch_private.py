"""Every private name of PyTorch that the library uses, and every change that the library makes to PyTorch.

No other file uses private names, except for the documented ``_version`` and ``_base`` of tensors. A function that the
installed PyTorch lacks raises :class:`RuntimeError`, which names the version, when it is called for the first time.
``import offload`` changes nothing: the first layer that is offloaded does, or the first with streamed weights.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.fx.experimental.proxy_tensor
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_lacking: list[str] = []


def _take(name: str, one: Any = torch) -> Any:
    """What PyTorch has under ``torch.name``, or ``one`` has; an error that names the version where it lacks that."""
    try:
        return functools.reduce(getattr, name.split("."), one)
    except AttributeError:
        whose = getattr(one, "__name__", type(one).__name__)
        raise RuntimeError(
            f"offload needs {whose}.{name}, which torch {torch.__version__} does not have; install a version of torch "
            "that this version of offload supports (see its page on installation)."
        ) from None


def _find(name: str, *, called: bool = True) -> Any:
    """What PyTorch has under ``torch.name``; where PyTorch lacks it, a function that raises when it is called."""
    try:
        return _take(name)
    except RuntimeError:
        if not called:
            _lacking.append(name)
        return lambda *_, **__: _take(name)


_constant = functools.partial(_find, called=False)  # where PyTorch lacks it, the first layer that is offloaded raises


top_hooks, _pop_hooks = (_find(f"_C._autograd._{what}_saved_tensors_default_hooks") for what in ("top", "pop"))
this_backward = _find("_C._current_graph_task_id")  # the number of the innermost one of this thread; -1 outside
_executes, _node_at_work = _find("_C._will_engine_execute_node"), _find("_C._current_autograd_node")
_proxy_mode, count_modes = _find("fx.experimental.proxy_tensor.get_proxy_mode"), _find("_C._len_torch_dispatch_stack")
_tracing, _fx_traces = _find("_C._get_tracing_state"), _find("fx._symbolic_trace.is_fx_symbolic_tracing")
_transforms = _find("_C._functorch.get_interpreter_stack")
dispatch_modes = _find("utils._python_dispatch._get_current_dispatch_mode_stack")  # the outermost first
_pop_mode, _push_mode = _find("utils._python_dispatch._pop_mode"), _find("utils._python_dispatch._push_mode")
_exclude, _set_excluded = _find("_C._ExcludeDispatchKeyGuard"), _find("_C._SetExcludeDispatchKeyGuard")
_COUNTING = _constant("_C.DispatchKey.ADInplaceOrView")
_uses, _set_eval_frame = _find("_C._storage_Use_Count"), _find("_C._dynamo.eval_frame.set_eval_frame")
_RULES, _HONOURS = "torch._dynamo.trace_rules", "offload: a policy's *_CPU_OFFLOAD is honoured"
COMPILED_CALL, ORIGINAL, RUNS_COMPILED = "_compiled_call_impl", "_orig_mod", "_TorchDynamoContext."
_patching = threading.Lock()

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
make_wrapper = torch.Tensor._make_wrapper_subclass  # a tensor of a class of its own, which has no memory
tree_leaves, FakeTensorMode = _find("utils._pytree.tree_leaves"), _find("_subclasses.FakeTensorMode")

# Autograd.

push_hooks = _find("_C._autograd._push_saved_tensors_default_hooks")  # lets autograd hand what it saves to ``pack``
why_no_hooks = _find("_C._autograd._saved_tensors_hooks_get_disabled_error_message")
"""PyTorch's own words if it allows no hooks on saved tensors here, as inside ``torch.func.grad``."""
next_node = _find("_C._autograd._get_sequence_nr")  # its number; nodes made earlier in this thread have lower ones
keeps_graph = _find("_C._autograd._get_current_graph_task_keep_graph")  # whether backward has retain_graph=True
keep_versions = _find("autograd._unsafe_preserve_version_counter")  # a context that undoes changes of a version
CAST_NODE = _constant("_C._functions.ToCopyBackward0")  # the node of ``Tensor.to``, which autocast calls on a parameter
RESHAPED_NODE = _constant("_C._functions.UnsafeViewBackward0")  # it gives a matrix product's result its shape

run_first = operator.methodcaller("_set_sequence_nr", 2**64 - 1)
"""Lets backward run a node as soon as its gradient is there, as a leaf's: the highest number runs first."""


def in_backward() -> bool:
    """Whether this thread runs a node of an autograd graph."""
    return bool(this_backward() != -1)


def in_checkpoint() -> bool:
    """Whether activation checkpointing decides here what is saved; hooks inside of its own would undo it."""
    hooks = top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__


def pop_hooks(pack: Callable[[torch.Tensor], Any]) -> None:
    """Take these hooks off, if they are there, also from below those that an interrupt has left above them."""
    above = []
    while (hooks := top_hooks(True)) and hooks[0] != pack:
        above.append(hooks)
        _pop_hooks()
    if hooks:
        _pop_hooks()
    for left in reversed(above):
        push_hooks(*left)


def before_backward(output: Iterable[torch.Tensor], first_node: int, begin: Callable[[Any], None]) -> list[Any]:
    """Call ``begin`` whenever backward is about to run a node that made a tensor of ``output``; returns these nodes."""
    # The node has to be the layer's: from ``first_node`` on, of ``next_node``. A tensor that the layer only returns
    # belongs to another layer; its node may live on from step to step, and would collect a hook in each.
    made = (tensor.grad_fn for tensor in output)
    nodes = dict.fromkeys(node for node in made if node is not None and node._sequence_nr() >= first_node)
    for node in nodes:
        node.register_prehook(begin)
    return list(nodes)


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have autograd ``call`` when the backward that runs in this thread is over, unless backward fails."""
    _take("autograd.Variable._execution_engine").queue_callback(call)


@functools.cache
def before_its_error(call: Callable[[], object]) -> None:
    """Have ``call`` called in a thread whose backward has failed, maybe before autograd's own thread has freed it."""
    run, graph, autograd = map(_take, ("autograd.graph._engine_run_backward", "autograd.graph", "autograd"))

    @functools.wraps(run)
    def run_backward(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        except BaseException:
            if not in_backward():  # else an outer backward fails as well, or goes on
                call()
            raise

    graph._engine_run_backward = autograd._engine_run_backward = run_backward


def is_captured(node: Any) -> bool:
    """Whether ``torch.autograd.grad`` returns what arrives at this node, which is to run."""
    with suppress(RuntimeError):  # so it says that the node's input is captured
        _executes(node)
        return False
    return True


def has_gradient_hooks(parameter: Any, *, accumulated: bool = True) -> bool:
    """Whether the program has put hooks on a parameter's gradient, the ``accumulated`` one included or not."""
    return bool(parameter._backward_hooks or (accumulated and parameter._post_accumulate_grad_hooks))


# Tracing, transforms and dispatch.

begin_profile, end_profile = (_find(f"_C._autograd._{what}_profiler_legacy") for what in ("enable", "disable"))
profiles, profile_options = _find("_C._autograd._profiler_enabled"), _find("_C._profiler._ExperimentalConfig")
profiling = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")  # whether a profiler runs
function_modes = _find("overrides._get_current_function_mode_stack")  # they see calls of functions; the outermost first
without_torch_function = _find("_C.DisableTorchFunctionSubclass")


def is_traced() -> bool:
    """Whether operations are recorded: by ``torch.jit.trace``, ``torch.fx``, ``make_fx`` or ``torch.export``."""
    return bool(_tracing() or _proxy_mode() or _fx_traces())


def is_transformed() -> bool:
    """Whether tensors are wrapped, inside a transform of ``torch.func`` or ``torch.vmap`` that allows hooks."""
    kinds = {transform.key() for transform in _transforms() or ()}  # reverse mode, alone or among others, forbids hooks
    return bool(kinds) and _take("_C._functorch.TransformType").Grad not in kinds


def set_modes(wanted: Iterable[TorchDispatchMode]) -> None:
    """Let this thread be in these dispatch modes, the outermost first, and in no others."""
    for _ in range(count_modes()):
        _pop_mode()
    for mode in wanted:
        _push_mode(mode)


def without_modes() -> AbstractContextManager[object]:
    """A context in which no dispatch mode sees what is done."""
    keys, key = _take("_C.DispatchKeySet"), _take("_C.DispatchKey")
    return cast("AbstractContextManager[object]", _exclude(keys(key.Python) | keys(key.PythonTLSSnapshot)))


def state_of(module: nn.Module) -> list[dict[str, Any]]:
    """What a module's forward may depend on: its attributes, parameters, buffers and submodules, in this order."""
    return [vars(module), module._parameters, module._buffers, module._modules]


schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")  # what an operation takes, returns and writes
CAST, OPERATOR = torch.ops.aten._to_copy.default, _constant("_ops.OpOverload")
MODULE_CALL = _constant("nn.Module._call_impl.__code__")


def without_wrapper(function: Any) -> Any:
    """What runs an operation, without the call in Python around it."""
    return function._op if type(function) is OPERATOR else function


counting_versions: Callable[[], AbstractContextManager[object]] = functools.partial(_set_excluded, _COUNTING, False)
"""Lets ``detach`` count changes with its origin in a dispatch mode, above which PyTorch has left that part."""
are_deterministic = _find("_C._get_deterministic_algorithms"), _find("_C._get_deterministic_algorithms_warn_only")
attention_kernels = [_find(f"_C._get_{kind}_sdp_enabled") for kind in ("flash", "mem_efficient", "math", "cudnn")]

# Storages and streams.

address_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""What tells a storage from all others while it lives: the address of PyTorch's own object."""
negated = _find("_neg_view")  # a tensor with its elements' other sign
refuse_access: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)  # builds for the CPU lack it
"""Lets whatever asks for the memory of a storage, given by its address, raise an error with the given text."""
raw_stream = _find("_C._cuda_getCurrentRawStream")  # the handle of the current stream of a device, given by its index
spin = _find("cuda._sleep")  # keeps the current stream busy for so many cycles


def asks_once() -> bool:
    """Whether a node of PyTorch's own is at work, which asks for what it has saved once; a user's may ask again."""
    node = _node_at_work()
    return node is not None and type(node).__module__ == "builtins" and type(node).__name__ != "CppFunction"


def owners_of(storage: torch.UntypedStorage) -> int:
    """How many tensors share a storage."""
    return int(_uses(address_of(storage))) - 1  # one more reference is the Python object itself


# Modules, DistributedDataParallel, pipelines.

APPLY = "_apply"  # the method of a module that ``to``, ``cuda``, ``half`` and others call
forward_hooks: Callable[[nn.Module], tuple[Any, Any]] = operator.attrgetter("_forward_pre_hooks", "_forward_hooks")
state_dict_hooks: Callable[[nn.Module], dict[int, Any]] = operator.attrgetter("_state_dict_pre_hooks")
running_ddp: Callable[[], Any] = functools.partial(_take, "_active_ddp_module", DistributedDataParallel)  # or None
ddp_parameters: Callable[[Any], Iterable[nn.Parameter]] = functools.partial(_take, "_module_parameters")


def ordinary_apply(module: nn.Module) -> MethodType:
    """The module's own method, whatever the module was given in its place."""
    return MethodType(type(module)._apply, module)


def flat_weights(module: nn.Module) -> list[Any]:
    """The list that an LSTM and its like compute with, in place of their attributes; other modules have none."""
    return getattr(module, "_flat_weights", []) if isinstance(module, nn.RNNBase) else []


def ignore_in_ddp(module: nn.Module, names: set[str]) -> None:
    """Let ``DistributedDataParallel`` leave out parameters of a module, beside those that it was told before."""
    ignored = names.union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    _take("_set_params_and_buffers_to_ignore_for_model", DistributedDataParallel)(module, ignored)


def pipeline_stages(schedule: Any) -> list[Any]:
    """The stages that a schedule of ``torch.distributed.pipelining`` runs on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [_take("_stage", schedule)]


# torch.compile, without loading the compiler, which takes seconds.

_HINT = (
    "offload moves tensors here, which no graph can hold; compile without fullgraph=True, or compile each layer by "
    "itself. For torch.export, take offloading off first, by handle.remove() or by leaving out the context, or "
    "export with strict=False"
)


def interpreted(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Do what ``torch.compiler.disable`` does: the interpreter runs the function and all that the function calls."""
    # The compiler knows such a function by the same attributes. Where a graph must not break, it shows the remedy.

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        compiling = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(compiling)

    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_HINT, _torchdynamo_orig_callable=function)
    return call


def swap_own_generators(value: bool) -> bool:
    """Set whether what compiled code recomputes draws from generators of its own; returns what was set before."""
    config = _take("_functorch.config")  # whose patch() leaves a context variable behind each time
    before, config.graphsafe_rng_functionalization = _take("graphsafe_rng_functionalization", config), value
    return bool(before)


def when_compiling(begins: Callable[..., object], ends: Callable[..., object] = lambda _: None) -> None:
    """Have these called whenever the compiler begins, and has ended."""
    compiler = importlib.import_module("torch._dynamo.callback").callback_handler
    if begins not in compiler.start_callbacks:  # the first time, or since torch.compiler.reset()
        compiler.register_start_callback(begins)
        compiler.register_end_callback(ends)


def compiles() -> bool:
    """Whether compiled code runs as such: PyTorch leaves it out under modes that want to see all operations."""
    return "torch._dynamo" not in sys.modules or all(mode.ignore_compile_internals() for mode in dispatch_modes())


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled: by ``module.compile()``, ``torch.compile(module)``, or in place."""
    return bool(getattr(module, COMPILED_CALL)) or ORIGINAL in module._modules or hasattr(module.forward, "is_compiled")


def compiler_of(module: nn.Module) -> Callable[..., Any] | None:
    """What compiles a function as the program has compiled a module; ``None`` if unknown, or with CUDA graphs."""
    compiled: Any = module if ORIGINAL in module._modules else getattr(module, COMPILED_CALL)
    config = getattr(compiled, "get_compiler_config", None)
    if config is None or (config() or {}).get("triton.cudagraphs"):
        return None
    # PyTorch tells the settings, and nothing that compiles with them again but what this function closes over.
    return next(filter(callable, (cell.cell_contents for cell in config.__closure__ or ())), None)


@functools.cache
def leave_to_interpreter() -> None:
    """Where a compiled layer breaks its graph, the compiler would take the library's code for the program's."""
    if "torch._dynamo" in sys.modules:
        importlib.import_module(_RULES).add("offload")
    else:
        sys.meta_path.insert(0, _WhenRulesAreImported())


def forget_compiled() -> None:
    """Let all code be compiled again: the compiler does not look whether a module's hooks have changed."""
    if (compiler := sys.modules.get("torch._dynamo")) is not None:
        compiler.reset_code_caches()


def before_unseen_reads(call: Callable[..., Any]) -> bool:
    """Have ``call`` called before code is compiled and before CUDA graphs are replayed: neither says what it reads."""
    # Returns whether there is no compiled code yet, which says nothing either.
    when_compiling(call)
    graph = torch.cuda.CUDAGraph
    replay: Any = graph.replay
    if not hasattr(replay, "before"):
        graph.replay = lambda one: (call(), replay(one))[1]  # type: ignore[assignment, method-assign]
        vars(graph.replay)["before"] = call
    return not _take("output_codes.seen_ids", importlib.import_module("torch._dynamo.convert_frame"))


class _WhenRulesAreImported:
    """Adds the package to the compiler's rules as soon as those have been imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != _RULES:
            return None
        sys.meta_path.remove(self)  # the finder that is asked next is the real one
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda rules: (load(rules), rules.add("offload"))
        return spec


# Changes to PyTorch.


def patch_once(
    before_resize: Callable[[torch.UntypedStorage], None],
    keep: Callable[[torch.Tensor], Callable[[], torch.Tensor] | None],
    see: Callable[[Sequence[object]], None],
    takes: Callable[[], bool],
    owns: Callable[[object], bool],
    honour: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Learn of what PyTorch has no hooks for; the second call and later ones do nothing.

    ``before_resize`` is called before a storage is resized. Some programs free a saved tensor's memory themselves, by
    ``storage.resize_(0)``, and fill it before backward. PyTorch frees it at once, while a copy may still read it.
    ``keep`` takes what a selective checkpoint keeps, and returns what gives it back, or ``None`` to leave it there;
    ``see`` is told of the arguments of each operation in a checkpoint. ``takes`` says whether what checkpoints keep
    here is offloaded; then ``honour`` is given their policy. ``owns`` says whether a hook is one of the library's.
    """
    with _patching:
        resize: Any = torch.UntypedStorage.resize_
        if hasattr(resize, "before"):
            return
        module, parameter, operation = nn.Module(), nn.Parameter(torch.empty(0)), torch.ops.aten.add.Tensor
        read = {module: "_forward_pre_hooks", parameter: "_backward_hooks", operation: "_schema"}
        for one, name in [*((torch, name) for name in _lacking), (torch.UntypedStorage(0), "_cdata"), *read.items()]:
            _take(name, one)  # else the error where it is used would not name the version

        @functools.wraps(resize)
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
            before_resize(storage)
            resize(storage, nbytes)

        _patch_checkpoint(keep, see, takes, owns, honour)
        vars(resize_)["before"] = before_resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]  # a patch, on purpose


@functools.cache
def before_reads(call: Callable[[torch.Tensor], object]) -> None:
    """Have ``call`` called before Python reads a tensor by what is no operation."""
    for name in ("tolist", "numpy", "__dlpack__"):
        read = getattr(torch.Tensor, name)
        told = functools.wraps(read)(lambda one, *a, read=read, **b: (call(one), read(one, *a, **b))[1])
        setattr(torch.Tensor, name, told)


def _patch_checkpoint(keep: Any, see: Any, takes: Any, owns: Any, honour: Any) -> None:
    module: Any = torch.utils.checkpoint
    wrapper: Any = _take("utils.checkpoint._VersionWrapper")
    caching, cached = (_take(f"utils.checkpoint._{kind}TorchDispatchMode") for kind in ("Caching", "Cached"))
    cache, look_up = caching.__torch_dispatch__, cached.__torch_dispatch__
    user_hooks = getattr(module, "_current_user_saved_tensors_hooks", lambda: None)  # since torch 2.14

    class Kept(wrapper):  # type: ignore[misc]  # private in PyTorch, and without types
        """A result that is kept, or something beside it that is no tensor."""

        def __init__(self, value: Any, **packed: Any) -> None:
            self.again = keep(value) if isinstance(value, torch.Tensor) and not packed else None
            super().__init__(value if self.again is None else None, **packed)

        def get_val(self, allow_cache_entry_mutation: bool) -> Any:
            # What gives it back compares versions itself: a changed tensor cannot be had from the host.
            return super().get_val(allow_cache_entry_mutation) if self.again is None else self.again()

    @functools.wraps(cache)
    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        see(args)
        if _HONOURS not in mode.storage:  # the checkpoint's first operation
            mode.storage[_HONOURS] = takes()
            if mode.storage[_HONOURS]:
                mode.policy_fn = honour(mode.policy_fn)
        hooks = user_hooks()
        if hooks is not None and owns(hooks[0]):
            mode.respect_saved_tensors_hooks = False  # keep() takes the tensor, with what counts its changes
        return cache(mode, function, types, args, kwargs)

    @functools.wraps(look_up)
    def recompute(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if mode.storage.get(_HONOURS) and hasattr(mode, "policy_fn"):  # up to torch 2.12, which asks once more
            mode.policy_fn, mode.storage[_HONOURS] = honour(mode.policy_fn), False
        return look_up(mode, function, types, args, kwargs)

    caching.__torch_dispatch__, cached.__torch_dispatch__ = dispatch, recompute
    module._VersionWrapper = Kept
