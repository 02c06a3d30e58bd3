"""Write measured results into the pages: tables and pictures, from the records in ``results/``.

python tools/pages/results.py            rewrite the blocks in README.md, index.md and docs/, and the pictures
python tools/pages/results.py --check    write nothing; fail if a committed block or picture is out of date

A page says where a block belongs with two comments; what is between them is replaced::

    <!-- table: activations -->
    <!-- /table -->

The modules beside this one whose names end in ``_results`` know the records. Each has ``BLOCKS``, from a block's
kind and name to a function that gives its text for a page, and ``PICTURES``, from a path to a function that draws,
at both widths.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from drawing import Maker, at_both_widths, is_up_to_date, save
from page_text import ROOT

PAGES = ("README.md", "index.md", "docs/*.md", "docs/howto/*.md", "docs/explanation/*.md")
BLOCK = re.compile(r"(<!-- (table|picture): (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def merged(name: str) -> dict[Any, Any]:
    """The dictionaries of that name of all modules of results, as one.

    Raises:
        ValueError: Two modules have the same key.
    """
    together: dict[Any, Any] = {}
    for path in sorted(Path(__file__).parent.glob("*_results.py")):
        found = getattr(import_module(path.stem), name)
        if twice := together.keys() & found.keys():
            raise ValueError(f"{path.stem}.{name} must not repeat what another module has, got {sorted(twice)}")
        together |= found
    return together


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = merged("BLOCKS")
PICTURES: dict[Path, Maker] = merged("PICTURES")


def filled(text: str, page: Path) -> str:
    """The page's text with every block between its comments.

    Raises:
        ValueError: The page names a block that no module knows, or leaves one open.
    """
    found = [(match[2], match[3]) for match in BLOCK.finditer(text)]
    opened = re.findall(r"<!-- (table|picture): (\w+) -->", text)
    if found != opened or not set(opened) <= set(BLOCKS):
        known = ", ".join(f"'{kind}: {name}'" for kind, name in BLOCKS)
        raise ValueError(f"{page}: blocks must be closed, and be among {known}; got {opened}")
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2], match[3]](page) + match[4], text)


def pages() -> list[Path]:
    """The pages that may hold blocks."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def changes() -> dict[Path, str]:
    """The pages and pictures that the records change, and what they make of them."""
    changed = {page: text for page in pages() if (text := filled(before := page.read_text("utf-8"), page)) != before}
    with tempfile.TemporaryDirectory() as folder:
        for path, draw in at_both_widths(PICTURES).items():
            drawn = Path(folder) / path.name
            save(draw, drawn)
            if not is_up_to_date(ROOT / path, drawn):
                changed[ROOT / path] = drawn.read_text("utf-8")
    return changed


def main() -> None:
    """Write the blocks and the pictures, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    arguments = parser.parse_args()
    changed = changes()
    names = [path.relative_to(ROOT).as_posix() for path in changed]
    if arguments.check and names:
        sys.exit(f"out of date: {', '.join(names)}; run python tools/pages/results.py and commit the result.")
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    print("\n".join(names) or "all up to date")


if __name__ == "__main__":
    main()
