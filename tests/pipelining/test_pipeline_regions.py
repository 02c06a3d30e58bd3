"""A rank's memory by policy: the regions of its stages' layers are kept, offloaded or recomputed."""

import pytest
import torch
from lab import late_copies
from pipeline_worker import WIDTH, Block, attach, loss_of, same
from pipeline_worker import one_step as step
from ranks import group
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import offload
from offload.pipelining.chunk import largest_list
from offload.pipelining.plan import StageProfile

RECOMPUTE_MOST = {"*up*": "offload", "*norm*": "keep", "*": "recompute"}


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with group(tmp_path), late_copies(0.001):
        yield


class Stage(nn.Module):
    """What a model's stage looks like: layers between other modules, which run in an ``order``."""

    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(WIDTH)
        self.order = [*range(layers)]

    def forward(self, x):
        x = self.embed(x)
        for number in self.order:
            x = self.dropout(self.layers[number](x))
        return self.norm(x)


def pipeline(kind=ScheduleGPipe, layers=3):
    torch.manual_seed(0)
    stage = PipelineStage(Stage(layers), 0, 1, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=loss_of)
    step(schedule, stage)  # torch 2.11 runs the first forward once more, for its shapes, and so draws other numbers
    return schedule, stage


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(
    "policies",
    [RECOMPUTE_MOST, {"*": "recompute"}, {"*": "offload"}, {"*": "keep"}, {"gelu": "recompute", "addmm": "offload"}],
    ids=str,
)
def test_gradients_are_those_without(kind, policies):
    schedule, stage = pipeline(kind)
    expected = [step(schedule, stage, seed) for seed in range(3)]
    with attach(schedule, policies=policies) as handle:
        found = [step(schedule, stage, seed) for seed in range(3)]
    assert all(map(same, found, expected))
    assert handle.stats().late_reloads == 0
    assert handle.stats().reloaded_bytes == handle.stats().offloaded_bytes
    assert same(step(schedule, stage, 0), expected[0])


def test_a_profile_counts_offloaded_and_kept_regions():
    saved = {}
    for name, policies in {"offload": {"*": "offload"}, "keep": {"*": "keep"}, "both": RECOMPUTE_MOST}.items():
        schedule, stage = pipeline()
        with attach(schedule, policies=policies) as handle:
            step(schedule, stage)
            step(schedule, stage)
        saved[name] = handle.profile[0]
        assert sum(saved[name].tensors) == saved[name].saved_bytes
    assert saved["offload"].kept_bytes == saved["keep"].saved_bytes == 0
    assert saved["offload"].saved_bytes == saved["keep"].kept_bytes
    # Of each block: the output of `up` is offloaded, and so is its input, which cannot be recomputed.
    assert 0 < saved["both"].saved_bytes + saved["both"].kept_bytes < saved["offload"].saved_bytes


def test_what_is_planned_of_layers_that_save_unequal_amounts_is_offloaded():
    torch.manual_seed(0)
    stage = PipelineStage(nn.Sequential(Block(), Block()), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of)
    with attach(schedule, policies={"*": "recompute"}) as handle:  # the first layer's input is the stage's, and kept
        for _ in range(3):
            step(schedule, stage)
    assert handle.plan.offloaded_bytes == handle.plan.saved_bytes > 0
    assert handle.stats().offloaded_bytes == 2 * handle.plan.offloaded_bytes
    with attach(schedule, profile=handle.profile, parts=4) as again:
        assert again.profile[0].layers == ()  # parts are of equal size without policies


def test_what_is_recomputed_needs_no_memory():
    peaks = []
    for policies in ({"*": "keep"}, {"*": "recompute"}):
        schedule, stage = pipeline(layers=6)
        with attach(schedule, policies=policies, memory_budget="1TiB"):
            step(schedule, stage)
            with offload.memory_meter("cpu") as meter:
                step(schedule, stage)
        peaks.append(meter.peak_bytes)
    kept, recomputed = peaks
    assert recomputed < 0.6 * kept


def test_a_budget_counts_what_is_kept_and_regions_have_names():
    schedule, stage = pipeline()
    with attach(schedule, policies=RECOMPUTE_MOST) as handle:
        assert handle.regions(0) == {}
        step(schedule, stage)
        step(schedule, stage)
    assert handle.plan.peak_bytes >= 4 * handle.profile[0].kept_bytes
    assert handle.plan.parts == 3
    assert handle.regions(0, 2)["up: addmm"] == "offload"
    assert handle.regions(0, 2)["gelu"] == "recompute"
    assert handle.regions(1) == {}


def test_the_largest_list_of_modules_holds_the_layers():
    model = Stage()
    assert largest_list(model) == list(model.layers)
    cells = nn.Sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), nn.Sequential(nn.Linear(2, 2)))
    assert largest_list(cells) == list(cells)
    assert largest_list(model.norm) == [model.norm]
    model.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(model.layers)})
    assert largest_list(model) == list(model.layers.values())


def test_a_layer_may_be_left_out_and_the_program_may_run_layers_between_steps():
    schedule, stage = pipeline()
    stage.submod.order = [0, 2]
    expected = [step(schedule, stage, seed) for seed in range(3)]
    x = torch.ones(2, WIDTH, requires_grad=True)
    with attach(schedule, policies=RECOMPUTE_MOST) as handle:
        for seed in range(3):
            assert same(step(schedule, stage, seed), expected[seed])
            before = handle.stats().offloaded_bytes
            torch.autograd.grad(stage.submod.layers[0](x).sum(), x)
            assert handle.stats().offloaded_bytes == before


@pytest.mark.parametrize(("again", "before"), [(0, 2), (2, 2)], ids=["later", "at once"])
def test_a_layer_that_runs_twice_is_refused(again, before):
    schedule, stage = pipeline()
    stage.submod.order.append(again)
    with attach(schedule, policies=RECOMPUTE_MOST), pytest.raises(RuntimeError, match="failed to run forward") as error:
        step(schedule, stage)
    expected = f"must run in their order, each once, but layer {again} came after layer {before}"
    assert expected in str(error.value.__cause__)


def test_removed_layers_are_free_for_others():
    schedule, stage = pipeline()
    twin = PipelineStage(stage.submod, 0, 1, torch.device("cpu"))
    handle = attach(schedule, policies=RECOMPUTE_MOST)
    with pytest.raises(ValueError, match=r"layer 0 .*is offloaded already; call remove"):
        attach(ScheduleGPipe(twin, 4, loss_fn=loss_of), policies=RECOMPUTE_MOST)
    handle.remove()
    with (
        offload.offload_layers(stage.submod.layers, 1),
        pytest.raises(ValueError, match=r"layer 0 .*is offloaded already; call remove"),
    ):
        attach(schedule, policies=RECOMPUTE_MOST)
    attach(schedule, policies=RECOMPUTE_MOST)
    offload.remove(stage.submod.layers)
    attach(schedule, policies=RECOMPUTE_MOST).remove()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": {"*": "recompute"}, "parts": 4}, "parts must be left out with policies, .* got 4"),
        ({"policies": {"*": "drop"}}, "a policy must be one of 'keep', 'offload', 'recompute'"),
        (
            {"policies": {"*": "recompute"}, "profile": {0: StageProfile()}},
            "profile must say what each layer saves with policies",
        ),
    ],
)
def test_options_that_are_refused(options, message):
    schedule, _ = pipeline()
    with pytest.raises(ValueError, match=message):
        attach(schedule, **options)
    attach(schedule).remove()
