"""Write measured results into the pages, and draw pictures and figures, from the records in ``results/``.

python tools/pages/results.py            rewrite the blocks in README.md, index.md and docs/, and all drawings
python tools/pages/results.py --check    write nothing; fail if a committed block or drawing is out of date

A page says where a block belongs with two comments; what is between them is replaced::

    <!-- table: activations -->
    <!-- /table -->

The modules beside this one whose names end in ``_results`` know the records; ``figures`` draws what follows from the
library alone. ``blocks`` collects the blocks and drawings of all of them.
"""

import argparse
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from blocks import BLOCKS, PICTURES, ROOT
from drawing import at_both_widths, is_up_to_date, save

PAGES = ("README.md", "index.md", "docs/**/*.md")
BLOCK = re.compile(r"(<!-- (table|picture): (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)

for module in sorted(Path(__file__).parent.glob("*_results.py")):
    import_module(module.stem)
import_module("figures")


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


def changed_pages() -> dict[Path, str]:
    """The pages that the records change, and what they make of them."""
    return {page: text for page in pages() if (text := filled(before := page.read_text("utf-8"), page)) != before}


def changed_drawing(path: Path) -> str | None:
    """What is drawn now, if the committed drawing is another one."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / path.name
        save(at_both_widths(PICTURES)[path], drawn)
        return None if is_up_to_date(ROOT / path, drawn) else drawn.read_text("utf-8")


def main() -> None:
    """Write the blocks and the drawings, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    arguments = parser.parse_args()
    changed = changed_pages()
    changed |= {ROOT / path: text for path in at_both_widths(PICTURES) if (text := changed_drawing(path))}
    names = [path.relative_to(ROOT).as_posix() for path in changed]
    if arguments.check and names:
        sys.exit(f"out of date: {', '.join(names)}; run python tools/pages/results.py and commit the result.")
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    print("\n".join(names) or "all up to date")


if __name__ == "__main__":
    main()
