"""The benchmark suite runs on the CPU at small sizes, and its claims follow from its rows."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.autograd.graph import save_on_cpu

import offload
from benchmarks import cases, contenders, suite
from benchmarks.cases import HIDING_MARGIN, Case, hiding_tokens, small_cases
from benchmarks.comparison import Comparison
from benchmarks.instruments import HostCopies, SavedTensors
from benchmarks.models import Stack
from benchmarks.per_tensor import SIZES, small_copies
from benchmarks.verdicts import GIB, OTHERS, OWN, verdicts, with_ratios
from benchmarks.workloads import reference_decoder

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LINK = {"d2h_bytes_per_s": 1.0 * GIB, "h2d_bytes_per_s": 0.5 * GIB}
LINKS = {"decoder": LINK, "long sequence": {name: 2 * speed for name, speed in LINK.items()}}


def run_suite(monkeypatch, path, *arguments):
    monkeypatch.setattr(sys, "argv", ["suite", "--small", "--out", str(path), *arguments])
    suite.main()
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_suite(monkeypatch, tmp_path_factory.mktemp("suite") / "suite.json")


def test_every_workload_has_a_row_of_every_contender(record):
    assert record["small"]
    assert set(record["runs"]) >= {case.name for case in small_cases(suite.CASES)} | {"host_cost", "small_copies"}
    for case in small_cases(suite.CASES):
        here = [row for row in record["rows"] if row["workload"] == case.name]
        assert [row["contender"] for row in here] == [
            contender.label for contender in contenders.contenders(case.ks, case.checkpoint_ks, te_ks=case.te_ks)
        ]
        for row in here:
            assert "error" in row or {"step_s", "spread_s", "first_s", "peak_bytes", "pinned_bytes"} <= row.keys()
        assert all("error" not in row for row in here if row["family"] in ("nothing", "checkpoint", *OWN))


def test_this_library_moves_bytes_and_changes_no_gradient(record):
    own = [row for row in record["rows"] if row["family"] in OWN]
    assert all(row["bit_identical"] and row["copied_bytes"] and row["ratio_to_limit"] for row in own)


def test_more_layers_leave_less_memory(record):
    for name in ("decoder", "long sequence", "compiled decoder", "LayerNorm-MLP"):
        rows = [row for row in record["rows"] if row["workload"] == name and row["family"] in ("nothing", "offload")]
        peaks = [row["peak_bytes"] for row in sorted(rows, key=lambda row: row["k"])]
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == len(peaks)


def test_the_costs_of_a_tensor_are_there(record):
    (cost,), (copies,) = record["host_cost"], record["small_copies"]
    small = {"operation", "hooks", "alias", "stays_later", "stays"}
    assert cost.keys() >= {f"{name}_s" for name in small | {"large_operation", "bare_calls", "alone"}}
    assert cost["alone_s"] > 0
    assert [row["size_bytes"] for row in copies["sizes"]] == list(SIZES[:3])


def test_a_part_is_merged_into_the_record(record, monkeypatch, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(record), "utf-8")
    slow = offload.Link(1e6, 1e6, 1e6)
    with monkeypatch.context() as another_run:
        another_run.setattr(offload, "measure_link", lambda _: slow)
        merged = run_suite(monkeypatch, path, "--only", "norm_mlp", "--merge")
    earlier, later = (
        [(row["contender"], row["link_s"]) for row in found["rows"] if row["workload"] == "decoder" and "link_s" in row]
        for found in (record, merged)
    )
    # Each is judged by the link of its own run.
    assert [(name, pytest.approx(link_s, rel=1e-4)) for name, link_s in earlier] == later
    assert merged["runs"]["LayerNorm-MLP"]["link"]["d2h_bytes_per_s"] == 1e6
    assert len(merged["rows"]) == len(record["rows"])
    assert merged["host_cost"] == record["host_cost"]
    twice = run_suite(monkeypatch, path, "--only", "small_copies", "--merge")["small_copies"]
    assert twice[0] == record["small_copies"][0]
    assert len(twice) == 2
    alone = run_suite(monkeypatch, path, "--only", "norm_mlp")
    assert {row["workload"] for row in alone["rows"]} == {"LayerNorm-MLP"}


def test_records_of_different_versions_are_not_merged(tmp_path):
    path = tmp_path / "suite.json"
    header = {"hardware": {}, "versions": {"torch": "1"}, "small": True}
    path.write_text(json.dumps({**header, "rows": [], "runs": {}}), "utf-8")
    with pytest.raises(ValueError, match=r"must have this run's versions, \{'torch': '2'\}, got \{'torch': '1'\}"):
        suite.Record(path, {**header, "versions": {"torch": "2"}}, {}, merge=True)


def test_on_a_cpu_only_small_sizes_run(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.report.resolve_device", lambda _: CPU)
    monkeypatch.setattr(sys, "argv", ["suite"])
    with pytest.raises(SystemExit):
        suite.main()
    assert "give --small" in capsys.readouterr().err


# Packages that are not installed.


def stand_in(monkeypatch, name, **attributes):
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        module = ModuleType(path)
        module.__spec__ = ModuleSpec(path, None)
        monkeypatch.setitem(sys.modules, path, module)
    vars(module).update(attributes)


def mlp_rows(**changes):
    case = next(small_cases(["norm_mlp"]))
    rows: list = []
    settings = {"min_bytes": 1, "host_bytes": GIB, **changes}
    Comparison(case, CPU, **settings).run(rows, lambda: None)
    return {row["contender"]: row for row in rows}


def test_transformer_engine_is_used_as_its_users_do(monkeypatch):
    made = []

    def get_cpu_offload_context(**arguments):
        made.append(arguments)
        context, sync = offload.get_cpu_offload_context(**arguments, min_bytes=1)
        return context, sync

    stand_in(monkeypatch, "transformer_engine.pytorch", get_cpu_offload_context=get_cpu_offload_context)
    rows = mlp_rows()
    assert {(made["num_layers"], made["model_layers"]) for made in made} == {(1, 4), (2, 4)}
    for k in (1, 2):
        assert rows[f"Transformer Engine, k = {k}"]["bit_identical"]
        assert rows[f"Transformer Engine, k = {k}"]["peak_bytes"] == rows[f"this library, k = {k}"]["peak_bytes"]


FILE_OF_ANOTHER = """
import transformer_engine.pytorch as te
import transformer_engine.pytorch.cpu_offload_v1 as before
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from .quantized_tensor import QuantizedTensor, prepare_for_saving, restore_from_saved

import offload

entered = []


def get_cpu_offload_context(**arguments):
    assert not TEDebugState.debug_enabled
    assert te.cpu_offload_v1 is before
    tensors, objects = prepare_for_saving(1, 2)
    assert restore_from_saved(objects, tensors) == [1, 2]
    assert not isinstance(tensors, QuantizedTensor)
    entered.append(arguments)
    return offload.get_cpu_offload_context(**arguments, min_bytes=1)
"""


@pytest.fixture
def te_file(tmp_path):
    path = tmp_path / "cpu_offload.py"
    path.write_text(FILE_OF_ANOTHER, "utf-8")
    path.with_suffix(".txt").write_text("commit: 123abc\nlicence: ours\n", "utf-8")
    return path


def test_transformer_engine_s_file_runs_alone(te_file, monkeypatch):
    stand_in(monkeypatch, "transformer_engine.pytorch")
    before = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    rows = mlp_rows(te_file=te_file)
    for k in (1, 2):
        assert rows[f"Transformer Engine, k = {k}"]["bit_identical"]
        assert rows[f"Transformer Engine, k = {k}"]["peak_bytes"] == rows[f"this library, k = {k}"]["peak_bytes"]
    assert {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")} == before


def test_the_record_says_which_file_was_run(te_file, monkeypatch, tmp_path):
    arguments = ["--only", "norm_mlp", "--transformer-engine", str(te_file)]
    record = run_suite(monkeypatch, tmp_path / "suite.json", *arguments)
    said = record["runs"]["LayerNorm-MLP"]["transformer_engine"]
    assert (said["commit"], said["licence"], len(said["sha256"])) == ("123abc", "ours", 64)
    assert [row["k"] for row in record["rows"] if row["family"] == "te" and "step_s" in row] == [1, 2]
    te_file.with_suffix(".txt").write_text("commit: 123abc\n", "utf-8")
    with pytest.raises(ValueError, match=r"cpu_offload\.txt must name commit and licence, got no licence; add a line"):
        run_suite(monkeypatch, tmp_path / "suite.json", *arguments)
    te_file.unlink()
    with pytest.raises(ValueError, match=r"must be there, got .*cpu_offload\.py; give the path"):
        run_suite(monkeypatch, tmp_path / "suite.json", *arguments)


def test_who_fails_within_a_layer_leaves_no_hooks(monkeypatch):
    class Fails:
        def __enter__(self):
            self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: 1 / 0, lambda _: 1 / 0)
            self.hooks.__enter__()
            raise ValueError("within a layer")

        def __exit__(self, *_):
            self.hooks.__exit__()

    stand_in(monkeypatch, "transformer_engine.pytorch", get_cpu_offload_context=lambda **_: (Fails(), None))
    rows = mlp_rows()
    assert rows["Transformer Engine, k = 1"]["error"] == "ValueError: within a layer"
    assert rows["checkpoint under save_on_cpu"]["bit_identical"]


def test_trl_is_used_as_its_trainers_do(monkeypatch):
    known = []

    class OffloadActivations(save_on_cpu):
        def update_model_params(self, model):
            known.append(model)

    stand_in(monkeypatch, "trl.models.activation_offloading", OffloadActivations=OffloadActivations)
    rows = mlp_rows()
    assert rows["TRL OffloadActivations"]["bit_identical"]
    assert {type(model) for model in known} == {torch.nn.ModuleList}


def test_a_failure_is_a_row_and_the_others_go_on(monkeypatch):
    def get_cpu_offload_context(**_):
        raise ValueError("not this one\nfor a reason")

    stand_in(monkeypatch, "transformer_engine.pytorch", get_cpu_offload_context=get_cpu_offload_context)
    rows = mlp_rows()
    assert rows["Transformer Engine, k = 1"]["error"] == "ValueError: not this one"
    assert "times_s" not in rows["Transformer Engine, k = 1"]
    assert rows["this library, k = 2"]["bit_identical"]


def test_who_would_pin_too_much_is_left_out():
    rows = mlp_rows(host_bytes=1)
    assert rows["save_on_cpu"]["error"].startswith("would pin ")
    assert "error" not in rows["checkpoint under save_on_cpu"]


def test_a_changed_gradient_is_seen(monkeypatch):
    class Rounds(save_on_cpu):
        def __init__(self, **_):
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda tensor: pack(tensor.bfloat16().to(tensor.dtype))

    monkeypatch.setattr(contenders, "save_on_cpu", Rounds)
    rows = mlp_rows()
    assert not rows["save_on_cpu"]["bit_identical"]
    assert rows["this library, k = 2"]["bit_identical"]


def test_gradients_that_cannot_be_compared_are_not_equal(monkeypatch):
    monkeypatch.setattr(HostCopies, "__enter__", lambda _: 1 / 0)
    rows = mlp_rows()
    assert rows["save_on_cpu"]["gradients_error"].startswith("ZeroDivisionError")
    assert not rows["save_on_cpu"]["bit_identical"]
    assert "error" not in rows["save_on_cpu"]


# Instruments.


def test_saved_tensors_are_added_up_as_powers_of_two():
    x = torch.ones(3, 100, requires_grad=True)  # 1200 bytes
    with SavedTensors() as saved:
        y = torch.exp(x) * 2
    assert saved.pinned_bytes == 2048
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.exp(x))


@pytest.mark.gpu
def test_copies_to_the_host_are_counted():
    x = torch.ones(256, device="cuda", requires_grad=True)
    with HostCopies() as copies, save_on_cpu(pin_memory=True):
        y = torch.exp(x)
        (y * y).sum().backward()
    assert copies.nbytes == 3 * 1024


def test_memory_allocated_on_the_host_for_a_copy_is_not_counted_as_one():
    with HostCopies() as copies:
        torch.empty_like(torch.empty(4, device="meta"), device="cpu")
    assert copies.nbytes == 0


def test_small_copies_move_what_they_say():
    link = offload.Link(1e9, 2e9, 3e9)
    (row,) = small_copies(CPU, link, sizes=(1 << 16,), run_bytes=1 << 20, repeats=1)
    assert row["count"] == 16
    assert row["out_of_link"] == row["out_bytes_per_s"] / 1e9
    assert row["back_of_link"] == row["back_bytes_per_s"] / 2e9


def test_the_length_at_which_copies_hide():
    def forward_s(tokens):
        return 2e-6 * tokens + 1e-11 * tokens**2

    points = [(tokens, forward_s(tokens)) for tokens in (1000, 3000)]
    copy_s = 3e-6
    tokens = hiding_tokens(points, copy_s, 1024)
    assert tokens % 1024 == 0
    assert forward_s(tokens) >= HIDING_MARGIN * copy_s * tokens
    assert forward_s(tokens - 1024) < HIDING_MARGIN * copy_s * (tokens - 1024)
    assert hiding_tokens(points, 0.0, 1024) == 1024
    assert hiding_tokens([(1000, 1.0), (2000, 2.0)], copy_s, 1024) == 2000


def test_the_workloads_for_a_gpu_are_those_for_a_cpu():
    others = [name for name in cases.CASES if name != "long"]
    large, small = list(cases.cases(others, CPU, offload.Link(1e9, 1e9, 1e9), GIB)), list(small_cases(others))
    assert [case.name for case in large] == [case.name for case in small]
    assert [case.compiled for case in large] == [case.compiled for case in small]
    assert all(case.turns_s for case in large)


@pytest.mark.parametrize(("host_layers", "device_layers", "expected"), [(9, 9, 5), (3.5, 9, 4), (9, 4.5, 4), (1, 1, 3)])
def test_the_long_sequence_is_as_large_as_memory_allows(monkeypatch, host_layers, device_layers, expected):
    block = reference_decoder(small=True)
    layer_bytes = 0.0

    def hiding(points, copy_s_per_token, unit):
        nonlocal layer_bytes
        assert [tokens for tokens, _ in points] == [2 * unit, 4 * unit]
        assert all(seconds > 0 for _, seconds in points)
        layer_bytes = copy_s_per_token * 1e9 * 3 * unit
        total = SimpleNamespace(total_memory=device_layers * layer_bytes / cases.LONG_DEVICE_SHARE)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
        return 3 * unit

    monkeypatch.setattr(cases, "reference_decoder", lambda: block)
    monkeypatch.setattr(cases, "hiding_tokens", hiding)
    monkeypatch.setattr(cases, "LONG_UNIT", 16)
    monkeypatch.setattr(cases, "DEFAULT_MIN_BYTES", 1)
    one_set = block_bytes(block, 48)
    case = cases.long_sequence(CPU, offload.Link(1e9, 1e9, 1e9), host_layers * one_set)
    assert layer_bytes == one_set
    assert case.tokens == 48
    assert case.ks == case.checkpoint_ks == (expected - 1,)
    assert len(case.build(CPU).layers) == expected + 1


def block_bytes(workload, tokens):
    """What one block saves; the input and each operation's result count once."""
    one = replace(workload, layers=1, shape=(1, tokens, workload.shape[2]))
    layers, x = one.build(CPU)
    profile = offload.profile_layers(layers, lambda: layers[0](x).sum().backward(), min_bytes=1, device=CPU)
    return profile.layers[0].saved_bytes


def test_checkpointing_is_undone():
    case: Case = next(small_cases(["decoder"]))
    model = case.build(CPU)
    assert isinstance(model, Stack)
    before = model.layers
    with model.checkpointing():
        assert all(type(layer).__name__ == "Checkpointed" for layer in model.layers)
    assert model.layers == before


# Claims.


def row(family, step_s, peak_gib, *, workload="decoder", k=None, copied_gib=0.0, bit_identical=True):
    return {
        "workload": workload,
        "family": family,
        "contender": family if k is None else f"{family} {k}",
        "k": k,
        "times_s": [step_s, step_s, step_s],
        "peak_bytes": int(peak_gib * GIB),
        "copied_bytes": copied_gib * GIB,
        "bit_identical": bit_identical,
    }


GOOD = [
    row("nothing", 1.0, 20, k=0),
    row("checkpoint", 1.25, 3),
    row("save_on_cpu", 4.0, 2.5),
    row("checkpoint_on_cpu", 1.4, 1.9),
    row("offload", 1.0, 15, k=5, copied_gib=0.3),
    row("offload", 3.05, 3, k=18, copied_gib=1.0),
    row("offload_checkpoint", 1.26, 1.9, k=18),
    row("nothing", 5.0, 100, k=0, workload="long sequence"),
    row("offload", 5.1, 40, k=4, workload="long sequence"),
]


def said(rows):
    return {verdict["claim"]: verdict for verdict in verdicts(with_ratios(rows, LINKS))}


def holds(rows):
    return [verdict["holds"] for verdict in said(rows).values()]


def test_the_limit_is_compute_or_link():
    rows = {(row["contender"]): row for row in with_ratios(GOOD[:7], LINKS)}
    assert rows["offload 5"]["limit_s"] == 1.0  # 0.3 GiB take 0.9 s there and back
    assert rows["offload 18"]["limit_s"] == 3.0
    assert rows["offload 18"]["ratio_to_limit"] == 3.05 / 3.0
    assert rows["offload_checkpoint 18"]["limit_s"] == 1.25  # recomputing is part of its compute


def test_no_row_is_below_its_limit():
    """A GPU at its power limit may be faster while some layers travel than with nothing moved."""
    faster = [row("offload", 0.98, 17, k=2, copied_gib=0.1), row("offload_checkpoint", 1.24, 2, k=3)]
    rows = {row["contender"]: row for row in with_ratios([*GOOD[:7], *faster], LINKS)}
    assert rows["offload 2"]["ratio_to_limit"] == rows["offload_checkpoint 3"]["ratio_to_limit"] == 1
    assert rows["nothing 0"]["limit_s"] == rows["offload 5"]["limit_s"] == 0.98
    assert rows["checkpoint"]["limit_s"] == 1.24


def test_each_workload_has_the_link_of_its_own_run():
    rows = [{**row, "workload": "long sequence"} for row in GOOD[:6]]
    assert {row["contender"]: row for row in with_ratios(rows, LINKS)}["offload 18"]["link_s"] == 1.5


def test_the_median_and_the_spread_count():
    (found,) = with_ratios([{**GOOD[0], "times_s": [3.0, 1.0, 1.5]}], LINKS)
    assert (found["step_s"], found["spread_s"]) == (1.5, 2.0)


def test_all_claims_hold():
    assert holds(GOOD) == [True, None, True, True, True, True]


@pytest.mark.parametrize("family", OTHERS)
def test_a_contender_below_the_curve_is_reported(family):
    verdict = next(iter(said([*GOOD, row(family, 1.2, 10)]).values()))
    assert verdict["holds"] is False
    assert verdict["measured"] == f"not so: {family}: within its memory, this library takes 1.05 of its time"


@pytest.mark.parametrize(("step_s", "faster"), [(9.0, False), (1.2, True)])
def test_a_contender_with_less_memory_than_any_is_compared_with_the_end_of_the_curve(step_s, faster):
    verdict = next(iter(said([*GOOD, row("trl", step_s, 1.0)]).values()))
    assert verdict["holds"] is not faster
    assert f"trl needs 0.90 GiB less than the curve's end, which takes {1.26 / step_s:.2f}" in verdict["measured"]


def test_noise_and_contenders_that_move_nothing_are_not_reported():
    assert holds([*GOOD, row("trl", 1.25, 1.9), row("te", 1.26, 1.89)])[0] is True
    assert holds([*GOOD, row("checkpoint", 1.0, 0.5)])[0] is True
    assert holds([*GOOD, {**row("trl", 0, 0), "error": "it broke"}])[0] is True


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        (row("offload", 3.1, 3, k=18, copied_gib=1.0), "at most 1.03 of the limit"),
        (row("offload_checkpoint", 1.27, 1.9, k=18), "at least 1 GiB more than checkpointing"),
        (row("offload_checkpoint", 1.25, 2.1, k=18), "at least 1 GiB more than checkpointing"),
        (row("offload", 5.2, 40, k=4, workload="long sequence"), "every layer but the last"),
        (row("offload", 1.0, 15, k=5, copied_gib=0.3, bit_identical=False), "changes no bit"),
        ({**row("offload", 1.0, 15, k=5), "error": "it broke"}, "changes no bit"),
    ],
)
def test_a_violation_is_reported(changed, claim):
    names = ("workload", "contender")
    rows = [changed if all(old[name] == changed[name] for name in names) else old for old in GOOD]
    verdict = next(verdict for text, verdict in said(rows).items() if claim in text)
    assert verdict["holds"] is False


def test_what_was_not_measured_is_neither():
    assert holds([row("nothing", 1.0, 20, k=0)]) == [None] * 5
