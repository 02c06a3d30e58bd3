"""A Sphinx extension: what the site's HTML has that neither Furo nor nbsphinx gives it.

- Narrow drawings: where ``NAME_narrow.svg`` lies beside a page's ``NAME.svg``, phones are shown that one. A wide one
  without it scrolls in its own box.
- Alternative texts of notebooks' pictures: a cell says them in its metadata, as ``"alt": ["of its first picture", …]``.
- Code that only draws is folded, where a notebook's cell has the tag ``hide-input``; opening it needs no script. Where
  it does something else, the cell's metadata say what, as ``"fold": "What stands for …"``.
- Headings have levels, and the lines of a long signature are no definitions without a term, for screen readers. Long
  names of modules break after their dots, and names in tables between their words, where a phone has no room for them.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

NARROW = "(max-width: 47em)"
"""Where narrow drawings are shown: below, the text of the wide ones would be smaller than 9 pixels."""

FITTED_PX = 790
"""Notebooks' pictures that are wider scroll: fitted to a tablet, their text would be smaller than 9 pixels."""

PHONE_PX = 490
"""Notebooks' charts that are no wider are fitted to a phone, too: their text has 9 points and more, 12.5 pixels."""

FOLDED = "hide-input"
FOLD = '<details class="folded-code"><summary>{}</summary>'
FOLD_TITLE = "The code that draws this"

PICTURE = re.compile(r'<img\b[^>]*\bsrc="(?P<folder>[^"]*/)(?P<name>[^"/]+)\.svg"[^>]*/?>')
SIGNATURE_NAME = re.compile(r'<span class="sig-prename descclassname"><span class="pre">[^<]*</span></span>')
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
BREAK = re.compile(r"(?<=[_./(=])(?=\w)|(?<=[a-z])(?=[A-Z])")
SIGNATURE_LINES = re.compile(r"<dl>\n(?P<lines>(?:<dd>.*</dd>\n)+)</dl>")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what is defined below."""
    app.connect("doctree-read", finish_notebook)
    app.connect("env-updated", add_narrow_drawings)
    app.connect("html-page-context", mend_page, priority=900)  # after Furo has made its navigation
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def finish_notebook(app: Sphinx, doctree: nodes.document) -> None:
    """Give the pictures of a notebook the texts that its cells have for them, and fold the code of cells with the tag.

    A fold is a box that opens when it is asked for.
    """
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    texts = [text for cell in cells for text in cell["metadata"].get("alt", [])]
    shown = [node for node in doctree.findall(nodes.image) if f"_{path.stem}_" in Path(node["uri"]).name]
    code = [node for node in doctree.findall(nodes.container) if "nbinput" in node["classes"]]
    if len(shown) != len(texts):
        raise ValueError(f"{path.name}: its cells must have a text in 'alt' for each of {len(shown)}, got {len(texts)}")
    if len(code) != len(cells):
        raise ValueError(f"{path.name}: none of {len(cells)} cells of code must be empty, got {len(code)} with code")
    for node, text in zip(shown, texts, strict=True):
        node["alt"] = text
        with (Path(app.srcdir) / node["uri"].removeprefix("/")).open("rb") as file:
            width = int.from_bytes(file.read(20)[16:])
        if width > FITTED_PX:
            node["classes"].append("as-drawn")
        if width <= PHONE_PX:
            node["classes"].append("fits-phones")
    for node, cell in zip(code, cells, strict=True):
        if FOLDED in cell["metadata"].get("tags", ()):
            at = node.parent.index(node)
            node.parent.insert(at + 1, nodes.raw("", "</details>", format="html"))
            title = html.escape(cell["metadata"].get("fold", FOLD_TITLE))
            node.parent.insert(at, nodes.raw("", FOLD.format(title), format="html"))


def add_narrow_drawings(app: Sphinx, env: Any) -> None:
    """Have the narrow drawings copied beside the wide ones."""
    for image in list(env.images):
        narrow = Path(image).with_stem(f"{Path(image).stem}_narrow")
        if (Path(app.srcdir) / narrow).exists():
            for docname in env.images[image][0]:
                env.images.add_file(docname, narrow.as_posix())


def mend_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Change a page's HTML before it is put into its frame."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            # The page's title is a heading of level 1; a caption stands above a list of pages.
            context[part] = context[part].replace('role="heading"', 'role="heading" aria-level="2"')
    if "body" not in context:
        return
    known = {name: path for path, (_, name) in app.env.images.items()}

    def with_narrow(match: re.Match[str]) -> str:
        narrow = f"{match['name']}_narrow.svg"
        if narrow not in known:
            return f'<span class="figure-box wide">{match[0]}</span>'
        app.builder.images[known[narrow]] = narrow  # copied with those that pages name themselves
        source = f'<source media="{NARROW}" srcset="{match["folder"]}{narrow}">'
        return f'<span class="figure-box"><picture>{source}{match[0]}</picture></span>'

    body = PICTURE.sub(with_narrow, context["body"])
    body = CELL.sub(lambda cell: CODE.sub(lambda code: BREAK.sub("<wbr>", code[0]), cell[0]), body)
    body = SIGNATURE_NAME.sub(lambda match: match[0].replace(".", ".<wbr>"), body)  # a long name breaks there
    context["body"] = SIGNATURE_LINES.sub(_signature_lines, body)


def _signature_lines(match: re.Match[str]) -> str:
    lines = match["lines"].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
    return f'<span class="sig-lines">\n{lines}</span>'
