"""How much the pages say, and that they and the code use the field's words: one word for one thing."""

import io
import json
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = [ROOT / "index.md", *sorted(ROOT.glob("docs/**/*.md"))]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
TEXTS = [ROOT / "README.md", *SITE, ROOT / "CHANGELOG.md", ROOT / "MAP.md"]
CODE = sorted([*ROOT.glob("offload/**/*.py"), *ROOT.glob("docs/examples/*.py")])

MOST_WORDS = 16_000
"""Of prose on all pages of the site together: no code, no table, no text of a picture, no docstring."""

OUT = {
    r"travel\w*": "is offloaded",
    r"c(?:o|a)m(?:e|es|ing) back|came back": "is reloaded",
    r"comput(?:e|ed|es|ing) again": "recompute",
    r"treat(?:s|ed|ing|ment|ments)?": "policy",
    r"trips?|walk(?:s|ed)?|houses?|keepers?": "the field's word",
    r"frugal|dear(?:er|est)?": "with the least memory; expensive",
    r"there and back|back and forth": "to the host and to the device",
}
"""Pattern of a word that is out → what to write."""
OUT |= {r"stay(?:s|ed|ing)? (?:on the|there)|stay(?:s|ed)? valid": "is kept on the device, remains"}
OUT_OF_PAGES = OUT | {
    r"stay(?:s|ed|ing)?": "is kept on the device",
    r"beside": "while … runs; next to",
    r"(?<!this is )what (?:it|they) \w+": "the noun",
    r"finds? no room|has no room|have room|makes? room": "does not fit",
    r"br(?:ing|ings|ought)": "copy to the device, reload",
    r"lets? go": "frees",
}


def prose(text: str) -> str:
    """What a page says in sentences: without code, tables, comments, pictures, options, and addresses of links."""
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\||:{3,}|:\w+:|-{3,})", line))
    return re.sub(r"\]\([^)]*\)", "]", text)


def words_of(page: Path) -> int:
    return sum(bool(re.search(r"\w", word)) for word in prose(page.read_text("utf-8")).split())


def test_the_pages_are_short_enough():
    """``pytest -s`` prints the words of each page; a failure does, too."""
    counts = {page.relative_to(ROOT).as_posix(): words_of(page) for page in SITE}
    lines = [f"{count:6,}  {name}" for name, count in counts.items()]
    lines.append(f"{sum(counts.values()):6,}  words on {len(counts)} pages, of at most {MOST_WORDS:,}")
    print("\n".join(lines))  # noqa: T201  the counts are for people
    assert sum(counts.values()) <= MOST_WORDS
    assert counts["index.md"] <= 350


def test_counts_sentences_and_nothing_else():
    page = (
        "# A title\n\nTwo [words](a.md).\n\n| a | b |\n|---|---|\n\n```python\nx = 1\n```\n<!-- no -->\n![alt](x.svg)\n"
    )
    assert prose(page).split() == ["#", "A", "title", "Two", "[words]."]


def found_in(text: str, words: dict[str, str]) -> list[str]:
    """Lines with a word that is out, and what to write."""
    said = []
    for pattern, instead in words.items():
        for match in re.finditer(rf"(?<![\w-])(?:{pattern})(?![\w-])", text, re.IGNORECASE):
            line = text[text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0].strip()
            said.append(f"{match[0]!r}, write: {instead}; in: {line[:120]}")
    return said


def sentences(page: Path) -> str:
    """A page's prose, tables and texts of pictures, without what the library says, which is quoted."""
    text = page.read_text("utf-8")
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\"[^\"\n]*\"|\]\([^)\n]*\)", "", text)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_words_of_the_field(page):
    assert not found_in(sentences(page), OUT_OF_PAGES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_use_the_words_of_the_field(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert not found_in(re.sub(r"`[^`\n]*`", "", text), OUT_OF_PAGES)


def texts_of_code(path: Path) -> str:
    """The comments and the texts of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return "\n".join(token.string for token in tokens if token.type in kinds)


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_uses_the_words_of_the_field(path):
    assert not found_in(texts_of_code(path), OUT)


def test_words_that_are_out_are_found():
    for text in ("a tensor travels to the host", "it comes back", "the treatment of a region", "Frugal plans"):
        assert len(found_in(text, OUT)) == 1
    assert found_in("tensors that stay there", OUT_OF_PAGES)
    assert not found_in("layers, regions and a house-number", OUT_OF_PAGES)
