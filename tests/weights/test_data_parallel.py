"""Streamed weights on several ranks: the gradients and parameters of ``DistributedDataParallel``, to the last bit."""

from collections.abc import Iterator
from typing import Any

import data_parallel_worker
import pytest
import torch
import torch.distributed as dist
from data_parallel_worker import CASES, LAYERS, ROUNDED, STEPS, Model
from models import WIDTH, assert_same, build, loss_of
from ranks import ranks_of
from streaming import gradients
from torch import nn

from offload import stream_weights

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


ranks = ranks_of(data_parallel_worker)


def differing(expected: list[Any], found: list[Any]) -> list[int]:
    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) and other is not None else one == other

    return [number for number, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)]


@pytest.mark.parametrize("case", CASES)
def test_like_plain_data_parallelism(case: str, ranks: Found) -> None:
    for rank in ranks:
        expected, found = rank[case]["expected"], rank[case]["found"]
        assert not differing(expected, found)
        assert any(isinstance(each, torch.Tensor) and each.any() for each in found)


@pytest.mark.parametrize("case", ROUNDED)
def test_but_for_rounding(case: str, ranks: Found) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank[case]["expected"], rank[case]["found"])
    parameters = [rank[case]["found"][-8:] for rank in ranks]
    assert not differing(*parameters)


def test_sums_come_up_once_per_step_and_are_not_added_on_the_host(ranks: Found) -> None:
    for rank in ranks:
        once, sums = (rank[case]["stats"] for case in ("one microbatch", "no_sync"))
        assert once.added_bytes == 0
        # Two microbatches of three go as ever: the first lands, the second is added.
        weights = sum(p.nbytes for p in Model().layers.parameters() if len(p) != 3)
        assert sums.added_bytes == STEPS * weights


def test_layers_without_a_wrapper(ranks: Found) -> None:
    found = [rank["without_wrapper"] for rank in ranks]
    assert not differing(found[0]["weights"], found[1]["weights"])
    assert differing(found[0]["local"], found[1]["local"])
    assert not differing(found[0]["both"], found[1]["both"])
    for one in found:
        assert (one["inside"], one["outside"]) == (0, LAYERS + 1)


def test_averages_in_float32(ranks: Found) -> None:
    [one, other] = (rank["in_float32"] for rank in ranks)
    sums = [
        [None if a is None else a.float() + b.float() for a, b in zip(*rank["own"], strict=True)]
        for rank in (one, other)
    ]
    expected = [None if a is None else a / 2 + b / 2 for a, b in zip(*sums, strict=True)]
    assert {gradient.dtype for gradient in one["found"] if gradient is not None} == {torch.float32}
    assert not differing(expected, one["found"])
    assert not differing(expected, other["found"])


def test_ranks_with_other_layers(ranks: Found) -> None:
    for rank in ranks:
        assert "must be the same on all ranks of process_group, got 2 to 3 layers of" in rank["other_layers"]


def test_a_gradient_that_does_not_come_from_its_layer(ranks: Found) -> None:
    errors, gradients = zip(*(rank["from_outside"] for rank in ranks), strict=True)
    assert [len(each) for each in errors] == [len(errors[0])] * 2 != [0, 0]
    for error in [error for each in errors for error in each]:
        assert "layer 1's out.weight must get its gradient from its layer alone if process_group is" in error
    assert not differing(*gradients)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank(group: dist.ProcessGroup) -> None:
    layers, x = build("gpt", LAYERS, torch.device("cpu"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
    expected = gradients(model, x, step)
    with stream_weights(layers, "cpu", process_group=group) as streamed:
        wrapped = nn.parallel.DistributedDataParallel(streamed.prepare_ddp(model))
        with streamed.no_sync():
            assert_same(expected, gradients(wrapped, x, step))


def step(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model(x)).backward()


def test_wrong_groups(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = build("gpt", 2, torch.device("cpu"))
    with pytest.raises(TypeError, match=r"process_group must be a .*ProcessGroup that this rank is in, got str; pass"):
        stream_weights(layers, "cpu", process_group="nccl")
    with pytest.raises(TypeError, match=r"that this rank is in, got int;"):
        stream_weights(layers, "cpu", process_group=dist.GroupMember.NON_GROUP_MEMBER)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(ValueError, match=r"must have a backend for cpu, .* got 'cuda:nccl'; make it with gloo"):
        stream_weights(layers, "cpu", process_group=group)
    step(nn.Sequential(*layers), x)


def test_wrong_models(group: dist.ProcessGroup) -> None:
    layers, _ = build("gpt", 2, torch.device("cpu"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
    with stream_weights(layers, "cpu", process_group=group) as streamed:
        with pytest.raises(TypeError, match="model must be a module that is not wrapped yet, got DistributedData"):
            streamed.prepare_ddp(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match="model must hold the streamed layers, got a Linear without some of them"):
            streamed.prepare_ddp(model[0])
        model._ddp_params_and_buffers_to_ignore = ["0.bias"]
        assert streamed.prepare_ddp(model) is model
        named = {name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"}
        assert model._ddp_params_and_buffers_to_ignore == named - {"0.weight"}
    with stream_weights(layers, "cpu") as streamed, pytest.raises(RuntimeError, match="streamed with a process_group"):
        streamed.prepare_ddp(model)
