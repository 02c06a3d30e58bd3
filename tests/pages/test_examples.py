"""Runs every example as a user would: as a script, in a folder of its own.

An example that needs a GPU says so with a constant, ``REQUIRES = "cuda"``; all others run on the CPU.
"""

import ast
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripts import NO_GPU, TORCH, TRAINERS, as_torchrun, run_scripts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
RANKS = ("ddp", "fsdp2", "fsdp2_llama", "pipeline", "weights_ddp")  # they use two GPUs, or none
NIGHTLY = ("pipeline", "lora_long_context")  # starts its ranks itself; as another one, and a page, with adapters
TRAINED = {
    "full_fine_tune",
    "hf_trainer",
    "lightning_trainer",
    "long_context",
    "lora_long_context",
    "peft_lora",
    "trl_sft",
}
WHOLE_ENDS = {"basic", "full_fine_tune", "manual", "weight_streaming"}  # one for each kind of what the library holds
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def needs_cuda(example: Path) -> bool:
    for statement in ast.parse(example.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="REQUIRES")], value=ast.Constant(value=value)):
                assert value == "cuda", f'{example.name}: REQUIRES must be "cuda", got {value!r}'
                return True
    return False


def run(example: Path, folder: Path, variables: dict[str, str], imported: Sequence[str] = ()) -> None:
    """Run it as a script; without a GPU, with modules imported that it imports in any case."""
    outside = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    environment = outside | {"MPLBACKEND": "agg"} | variables
    whole = example.stem in WHOLE_ENDS
    [done] = run_scripts([[str(example)]], folder, environment, imported=imported, strict=True, whole_end=whole)
    assert done.code == 0, done.output


ON_THE_CPU = [
    pytest.param(path, id=path.name, marks=pytest.mark.nightly if path.stem in NIGHTLY else ())
    for path in EXAMPLES
    if not needs_cuda(path) and path.stem not in set(RANKS) - {"pipeline"}
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("example", ON_THE_CPU)
def test_on_the_cpu(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path, NO_GPU, (*TORCH, *TRAINERS) if example.stem in TRAINED else TORCH)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", RANKS)
def test_ranks_on_the_cpu(name: str, tmp_path: Path) -> None:
    """As torchrun starts them; that the script can do so itself is shown by the example of a pipeline, nightly."""
    example = ROOT / "docs" / "examples" / f"{name}.py"
    for done in run_scripts(
        [[str(example)]] * 2, tmp_path, as_torchrun(os.environ | NO_GPU, 2), whole_end=name == "ddp"
    ):
        assert done.code == 0, done.output


def test_all_start_their_ranks_alike() -> None:
    def start(name: str) -> str:
        text = (ROOT / "docs" / "examples" / f"{name}.py").read_text("utf-8")
        [found] = [one for one in ast.parse(text).body if isinstance(one, ast.If) and "RANK" in ast.unparse(one.test)]
        return ast.unparse(found)

    assert "torch.distributed.run" in start("pipeline")
    assert len({start(name) for name in RANKS}) == 1


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.name, marks=pytest.mark.multigpu(n=2) if path.stem in RANKS else pytest.mark.gpu)
        for path in EXAMPLES
    ],
)
def test_on_gpus(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path, {})


@pytest.mark.parametrize("path", [*EXAMPLES, *NOTEBOOKS], ids=lambda path: path.name)
def test_what_asks_for_determinism_sets_up_cublas_for_it(path):
    """On a GPU it would be an error otherwise, which no run on the CPU shows."""
    text = path.read_text("utf-8")
    assert "use_deterministic_algorithms(True)" not in text or "CUBLAS_WORKSPACE_CONFIG" in text
