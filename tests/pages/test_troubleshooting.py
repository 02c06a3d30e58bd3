"""The page of troubleshooting quotes every warning, and every error of states, captures and host memory."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "howto" / "troubleshooting.md").read_text("utf-8"))
SAYS = {"warn_caller": 0, "_say": 1, "OffloadStateError": 0, "CaptureError": 0, "HostMemoryError": 0}
"""What warns or is raised → which of its arguments is the text."""
WORDS = 4


def phrases(node):
    """The beginnings of the pieces of a text that has at least so many words between what is filled in."""
    texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    for text in texts:
        words = re.findall(r"\S+", text)
        if not text[:1].isspace() and words[0][0] in ".,;:":
            words = words[1:]
        if len(words) >= WORDS:
            yield " ".join(words[:WORDS])


def quoted():
    found = {}
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = isinstance(node, ast.Call) and (getattr(node.func, "id", None) or getattr(node.func, "attr", None))
            if name in SAYS and len(node.args) > SAYS[name] and (said := list(phrases(node.args[SAYS[name]]))):
                found[f"{path.stem}:{node.lineno}"] = said
    return found


QUOTED = quoted()


def test_finds_what_is_said():
    assert len(QUOTED) >= 20


@pytest.mark.parametrize("where", QUOTED)
def test_is_on_the_page(where):
    assert any(phrase in PAGE for phrase in QUOTED[where]), f"docs/howto/troubleshooting.md lacks {QUOTED[where][0]!r}"


def test_every_reason_to_stay_has_a_row():
    caveats = (ROOT / "docs" / "caveats.md").read_text("utf-8")
    table = caveats[caveats.index("| reason | what it is |") :].split("\n\n")[0]
    reasons = re.findall(r"^\| (`[a-z ]+`) \|", table, re.MULTILINE)
    assert len(reasons) >= 9
    assert all(f"| {reason} |" in PAGE for reason in reasons)
