"""Runs the Python code of the documentation, page by page, on the CPU.

Every block fenced as ``python`` runs; the blocks of a page share one namespace, in order. Two additions:

- A block fenced as ``output`` right after one is what that block prints; ``...`` stands for any text.
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
    from scripts import NO_GPU, run_scripts

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "index.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
# Other ways to write Python blocks, which this module would pass over.
UNKNOWN = re.compile(r"(py|py3|python3|pycon|ipython)\b|python\S|\{(code|code-block|sourcecode)\}\s*py")


class Block(NamedTuple):
    line: int  # of its first line of code, from 1
    code: str
    run: bool
    output: str | None


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
        if info not in {"python", "output"}:
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
            blocks[-1] = blocks[-1]._replace(output=body)
        else:
            raise ValueError(f"line {start}: an output block must follow the python block that prints it")
        may_show_output = info == "python"
    return blocks


def run_page(page: Path) -> None:
    namespace = {"__name__": "__main__"}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block in read_blocks(page.read_text(encoding="utf-8")):
        # Padded, so that a traceback shows the page's own lines.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if not block.run:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        got = printed.getvalue()
        if block.output is None or doctest.OutputChecker().check_output(block.output, got, options):
            continue
        where = f"{page}, line {block.line}"
        raise AssertionError(f"{where}: the page shows\n{block.output}\nthe code prints\n{got}")


def has_code(page: Path) -> bool:
    return re.search(r"^ *(`{3,}|~{3,})\S*py", page.read_text(encoding="utf-8"), re.MULTILINE) is not None


PAGES_WITH_CODE = [page for page in PAGES if has_code(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page, tmp_path):
    environment = os.environ | NO_GPU | {"MPLBACKEND": "agg"}
    # In a folder of its own: a block may write files.
    [done] = run_scripts([[__file__, str(page)]], tmp_path, environment, imported=("torch", "pytest"), strict=True)
    assert done.code == 0, done.output


def test_pages_have_code():
    assert [block for page in PAGES_WITH_CODE for block in read_blocks(page.read_text()) if block.run]


def test_reads_blocks_at_any_depth():
    page = """
````{tab} One
- item
  ```python
  x = 1
  print(x)
  ```

  ```output
  1
  ```
````

<!-- not run: needs two GPUs -->
```python
y
```
"""
    assert read_blocks(page) == [
        Block(5, "x = 1\nprint(x)\n", run=True, output="1\n"),
        Block(16, "y\n", run=False, output=None),
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```py\nx\n```", "not as 'py'"),
        ("```{code-block} python\nx\n```", "not as '{code-block} python'"),
        ("<!-- not run: -->\n```python\nx\n```", "expected '<!-- not run: REASON -->'"),
        ("```output\nx\n```", "must follow the python block"),
        ("```python\nx\n```\ntext\n```output\nx\n```", "must follow the python block"),
    ],
)
def test_refuses_what_it_would_pass_over(page, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_blocks(page)


def test_compares_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```output\n2\n```\n")
    with pytest.raises(AssertionError, match="the page shows\n2\n\nthe code prints\n1"):
        run_page(page)


if __name__ == "__main__":
    warnings.simplefilter("error")
    run_page(Path(sys.argv[1]))
