"""The loss in chunks is the loss of whole logits, in float64 to 1e-12, and keeps nothing of their size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import chunked_cross_entropy

TOKENS, WIDTH, VOCABULARY = 23, 8, 31


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCABULARY, (2, TOKENS))
    labels[0, 3:6] = labels[1, -1] = -100
    return hidden, weight, labels, *([torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)] if bias else [])


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    logits = F.linear(hidden, weight, options.pop("bias", None))
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(precise).flatten(0, 1), labels.flatten(), **options)


def close(found: Any, expected: Any, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 46, 1000, None])
@pytest.mark.parametrize(("num_items", "reduction"), [(None, "mean"), (1, "sum")])
def test_it_is_the_loss_of_whole_logits(chunk_tokens: int | None, num_items: Any, reduction: str) -> None:
    hidden, weight, labels, bias = inputs(bias=True)
    leaves = [hidden, weight, bias]
    expected = whole(hidden, weight, labels, bias=bias, reduction=reduction)
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=chunk_tokens, num_items=num_items)
    close(found, expected)
    # Of a loss that is multiplied, as gradient accumulation and scalers do.
    close(torch.autograd.grad(found * 3.7, leaves), torch.autograd.grad(expected * 3.7, leaves))


@pytest.mark.parametrize("num_items", [17, torch.tensor(17)])
def test_the_sum_is_divided_by_the_items_that_a_trainer_counts(num_items: Any) -> None:
    hidden, weight, labels = inputs()
    found = chunked_cross_entropy(hidden, weight, labels, num_items=num_items, chunk_tokens=5)
    close(found, whole(hidden, weight, labels, reduction="sum") / 17)


def test_another_label_can_be_ignored_and_all_can() -> None:
    hidden, weight, labels = inputs()
    labels = labels.abs() % VOCABULARY
    labels[:, ::2] = 0
    close(chunked_cross_entropy(hidden, weight, labels, ignore_index=0), whole(hidden, weight, labels, ignore_index=0))
    nothing = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert nothing.isnan()  # as PyTorch's mean over nothing
    nothing.backward()
    assert weight.grad is not None
    assert not chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), num_items=1)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_costs_nothing(frozen: int) -> None:
    hidden, weight, labels = inputs()
    leaves = [hidden, weight]
    leaves[frozen].requires_grad_(False)
    made: list[tuple[int, ...]] = []
    with Sizes(made):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
    loss.backward()
    whole(hidden, weight, labels).backward()
    assert leaves[frozen].grad is None
    kept = leaves[1 - frozen]
    assert kept.grad is not None
    close(kept.grad, 2 * torch.autograd.grad(whole(hidden, weight, labels), kept)[0])
    if frozen == 1:
        assert (VOCABULARY, WIDTH) not in made


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, labels = inputs()
    made: list[tuple[int, ...]] = []
    with torch.no_grad(), Sizes(made):
        found = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
    close(found, whole(hidden, weight, labels).detach())
    assert not found.requires_grad
    assert (VOCABULARY, WIDTH) not in made
    assert not chunked_cross_entropy(hidden.detach(), weight.detach(), labels, chunk_tokens=5).requires_grad


def test_bfloat16_is_as_near_to_the_truth_as_whole_logits() -> None:
    """The weight's gradient is added up in float32: in bfloat16, 200 chunks would lose most of what they add."""
    torch.manual_seed(0)
    hidden = torch.randn(400, 64).bfloat16().requires_grad_()
    weight = torch.randn(50, 64).mul(0.1).bfloat16().requires_grad_()
    labels = torch.randint(50, (400,))
    leaves = [hidden, weight]

    def gradients(loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, leaves)

    exact = F.cross_entropy(hidden.double() @ weight.double().T, labels)
    of_whole = F.cross_entropy((hidden @ weight.T).float(), labels)
    of_chunks = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=2)
    assert of_chunks.dtype == torch.float32
    assert (of_chunks - exact).abs() < 1e-3
    for truth, plain, found in zip(gradients(exact), gradients(of_whole), gradients(of_chunks), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - truth).norm() < 1.2 * (plain - truth).norm() + 1e-3 * truth.norm()


def test_under_autocast_it_is_what_autocast_makes_of_whole_logits() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(hidden, weight, labels)
        found = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
    close(found, expected, 1e-5)
    leaves = [hidden, weight]
    close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), 1e-2)


def test_autocast_holds_no_copy_of_the_weight() -> None:
    """Each call casts the weight anew, and autocast would hold each cast until the end of its region."""
    hidden, weight, labels = inputs(torch.float32)

    def peak_bytes(calls: int) -> int:
        with torch.no_grad(), offload.memory_meter("cpu") as meter, torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(calls):
                with torch.enable_grad():
                    chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
        return meter.peak_bytes

    assert peak_bytes(1) == peak_bytes(4)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels) * 3
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(map(torch.equal, first, second))


def test_a_gradient_of_gradients_is_refused() -> None:
    """Autograd would take the first gradients for numbers that depend on nothing."""
    hidden, weight, labels = inputs()
    with pytest.raises(RuntimeError, match="create_graph=True must not be used with a loss in chunks"):
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), hidden, create_graph=True)


def test_no_tensor_has_the_size_of_the_logits_and_nobodys_hooks_see_a_chunks() -> None:
    """Who moves all that forward saves to the host must not move logits."""
    hidden, weight, labels = inputs()
    sizes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(tensor.shape))
        return tensor.detach()

    made: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Sizes(made):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
        assert (2 * TOKENS, WIDTH) in sizes
        assert not [size for size in sizes if len(size) == 2 and size[1] == VOCABULARY]
        loss.backward()
    assert max(size[0] for size in made if len(size) == 2 and size[1] == VOCABULARY) == 5


def test_gradients_go_as_soon_as_they_are_handed_on() -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
    saved = loss.grad_fn.next_functions[0][0]
    assert [None if one is None else one.shape for one in saved.saved_tensors] == [(46, WIDTH), weight.shape, None]
    loss.backward()
    with pytest.raises(RuntimeError, match="have already been freed"):
        len(saved.saved_tensors)


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 23\), got \(2, 22\)"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=0)
    for wrong in (weight[:, 1:], weight[0]):
        with pytest.raises(ValueError, match=r"\(…, width\) and weight \(vocabulary, width\), got \(2, 23, 8\)"):
            chunked_cross_entropy(hidden, wrong, labels)
    with pytest.raises(ValueError, match=r"bias must have shape \(31,\), got \(8,\)"):
        chunked_cross_entropy(hidden, weight, labels, bias=weight[0])


def test_hooks_of_a_weight_run_once_on_the_sum() -> None:
    hidden, weight, labels, bias = inputs(bias=True)
    calls, leaves = [], [hidden, weight, bias]
    for leaf in leaves:
        leaf.register_hook(lambda gradient: (calls.append(gradient.shape), gradient * 0.5)[1])
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=5)
    assert not calls
    loss.backward()
    found = [leaf.grad for leaf in leaves]
    assert sorted(calls) == sorted(leaf.shape for leaf in leaves)
    close(found, list(torch.autograd.grad(whole(hidden, weight, labels, bias=bias), leaves)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    hidden, weight, labels = (tensor.detach().cuda() for tensor in inputs(torch.bfloat16))
    hidden.requires_grad_()
    weight.requires_grad_()
    items = torch.tensor(17, device="cuda")

    def step() -> None:
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5, num_items=items)
        (loss + chunked_cross_entropy(hidden, weight, labels, chunk_tokens=46)).backward()

    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Sizes(TorchDispatchMode):
    """Writes down the sizes of all tensors that are made."""

    def __init__(self, made: list[tuple[int, ...]]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self._made.append(tuple(result.shape))
        return result
