"""Runs the Python code of the documentation, page by page, on the CPU.

Every block fenced as ``python`` runs; the blocks of a page share one namespace, in order. Two additions:

- A block fenced as ``output`` right after one is what that block prints; ``...`` stands for any text. Its figures are
  those of one run. Fenced as ``output timed``, times, rates, shares and decimals may differ; as ``output measured``,
  sizes in bytes may, too, by up to a factor of two. All other numbers and all words are the same.
- ``<!-- not run: REASON -->`` on the line before a block keeps it from running; it is still compiled.

``python tests/pages/test_docs.py PAGE`` runs one page by hand.
"""

import contextlib
import doctest
import io
import os
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

if __name__ != "__main__":
    from scripts import NO_GPU, TORCH, TRAINERS, run_scripts

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "index.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
# Other ways to write Python blocks, which this module would pass over.
UNKNOWN = re.compile(r"(py|py3|python3|pycon|ipython)\b|python\S|\{(code|code-block|sourcecode)\}\s*py")


NUMBER = re.compile(r"(?<![\w.])(?P<number>[\d,]*\d(\.\d+)?)( ?(?P<unit>%|GB/s|ms|µs|s\b|[KMGT]iB|[kMG]?B\b))?")
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
KINDS = {"output": "exact", "output timed": "timed", "output measured": "measured"}


class Block(NamedTuple):
    line: int  # of its first line of code, from 1
    code: str
    run: bool
    output: str | None
    kind: str = "exact"


def read_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    lines = text.splitlines()
    number = 0
    may_show_output = False
    while number < len(lines):
        fence = FENCE.fullmatch(lines[number])
        number += 1
        if fence is None:
            may_show_output = may_show_output and not lines[number - 1].strip()
            continue
        info = fence["info"].strip()
        if UNKNOWN.match(info):
            raise ValueError(f"line {number}: fence it as python or as another language, not as {info!r}")
        if info.startswith("output") and info not in KINDS:
            raise ValueError(f"line {number}: expected one of {', '.join(KINDS)}, got {info!r}")
        if info != "python" and info not in KINDS:
            continue
        start = number
        while lines[number].strip() != fence["ticks"]:
            number += 1
        body = "".join(line.removeprefix(fence["indent"]) + "\n" for line in lines[start:number])
        number += 1
        if info == "python":
            before = lines[start - 2].strip() if start > 1 else ""
            if before.startswith("<!--") and not NOT_RUN.fullmatch(before):
                raise ValueError(f"line {start - 1}: expected '<!-- not run: REASON -->', got {before!r}")
            blocks.append(Block(start + 1, body, not before.startswith("<!--"), None))
        elif may_show_output:
            blocks[-1] = blocks[-1]._replace(output=body, kind=KINDS[info])
        else:
            raise ValueError(f"line {start}: an output block must follow the python block that prints it")
        may_show_output = info == "python"
    return blocks


def agrees(shown: str, printed: str, kind: str) -> bool:
    """Whether what a page shows is what its code prints, but for the figures that its kind leaves open."""
    if kind == "measured":
        sizes = [[size for found in NUMBER.finditer(text) if (size := _bytes(found))] for text in (shown, printed)]
        if len(sizes[0]) != len(sizes[1]) or any(max(a, b) > 2 * min(a, b) for a, b in zip(*sizes, strict=True)):
            return False
    if kind != "exact":
        shown, printed = (NUMBER.sub(lambda found: _kept(found, kind), text) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def _bytes(found: re.Match[str]) -> float | None:
    unit = UNITS.get(found["unit"])
    return unit and unit * float(found["number"].replace(",", ""))


def _kept(found: re.Match[str], kind: str) -> str:
    """What has to be the same of a number."""
    if found["unit"] in UNITS:
        return found[0] if kind == "timed" else "SIZE"
    return "FIGURE" if found["unit"] or "." in found["number"] else found[0]


def run_page(page: Path) -> None:
    namespace = {"__name__": "__main__"}
    for block in read_blocks(page.read_text(encoding="utf-8")):
        # Padded, so that a traceback shows the page's own lines.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if not block.run:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        got = printed.getvalue()
        if block.output is None or agrees(block.output, got, block.kind):
            continue
        where = f"{page}, line {block.line}"
        raise AssertionError(f"{where}: the page shows\n{block.output}\nthe code prints\n{got}")


def has_code(page: Path) -> bool:
    return re.search(r"^ *(`{3,}|~{3,})\S*py", page.read_text(encoding="utf-8"), re.MULTILINE) is not None


def with_trainers(page: Path) -> bool:
    return "from transformers" in page.read_text("utf-8")


PAGES_WITH_CODE = [*filter(has_code, PAGES)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page, tmp_path):
    environment = os.environ | NO_GPU | {"MPLBACKEND": "agg"}
    imported = (*TORCH, *TRAINERS) if with_trainers(page) else TORCH
    # In a folder of its own: a block may write files.
    [done] = run_scripts(
        [[__file__, str(page)]], tmp_path, environment, imported=imported, strict=True, whole_end=False
    )
    assert done.code == 0, done.output


WIDEST = 105
"""Characters of code that a page shows beside its two columns at 1400 px."""


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_and_its_output_are_shown_whole(page):
    blocks = read_blocks(page.read_text("utf-8"))
    assert not [block.line for block in blocks if block.output and "..." in block.output]
    lines = [line for block in blocks for line in (block.code + (block.output or "")).splitlines()]
    assert not [line for line in lines if len(line) > WIDEST]


def test_compares_output(tmp_path):
    assert [block for page in PAGES_WITH_CODE for block in read_blocks(page.read_text()) if block.run]
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```output\n2\n```\n")
    with pytest.raises(AssertionError, match="the page shows\n2\n\nthe code prints\n1"):
        run_page(page)


PRINTED = "k = 4: step 12.5 ms, stalled 0 s, 97% at 9.6 GB/s, 1.02 times, 40.00 MiB of 2556 kB"


@pytest.mark.parametrize(
    ("shown", "timed", "measured"),
    [
        (PRINTED, True, True),
        ("k = 4: step 910 µs, stalled 1.25 ms, 100% at 11.0 GB/s, 0.98 times, 40.00 MiB of 2556 kB", True, True),
        (PRINTED.replace("40.00 MiB", "40.5 MiB"), False, True),
        (PRINTED.replace("40.00 MiB", "19.00 MiB"), False, False),
        (PRINTED.replace("k = 4", "k = 3"), False, False),
        (PRINTED.replace("stalled", "waiting"), False, False),
        (PRINTED + " 1", False, False),
    ],
)
def test_figures_of_a_run_may_differ_and_nothing_else(shown, timed, measured):
    assert agrees(shown, PRINTED, "exact") == (shown == PRINTED)
    assert agrees(shown, PRINTED, "timed") == timed
    assert agrees(shown, PRINTED, "measured") == measured


if __name__ == "__main__":
    warnings.simplefilter("error")
    # PyTorch's compiler imports a module that PyTorch's own decorator warns of.
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    run_page(Path(sys.argv[1]))
