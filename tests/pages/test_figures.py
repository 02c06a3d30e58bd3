"""The committed figures of the docs: up to date, readable, small."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import drawing
import figures

pytestmark = pytest.mark.slow

SVGS = sorted(figures.FOLDER.glob("*.svg"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, Path]:
    return {path.name: path for path in figures.write(tmp_path_factory.mktemp("figures"))}


def test_all_are_committed_and_no_other(drawn):
    assert [path.name for path in SVGS] == sorted(drawn)


@pytest.mark.parametrize("path", SVGS, ids=lambda path: path.stem)
def test_up_to_date(path, drawn):
    assert drawing.is_up_to_date(path, drawn[path.name]), "run python tools/pages/figures.py and commit the result"


@pytest.mark.parametrize(
    ("before", "after"),
    [(">F0</text>", ">F9</text>"), (">compute</text>", "></text>"), ("<text", "<tspan")],
)
def test_a_change_is_seen(drawn, tmp_path, before, after):
    source = drawn["schedule_2_of_5.svg"]
    changed = tmp_path / "changed.svg"
    text = source.read_text("utf-8")
    assert before in text
    changed.write_text(text.replace(before, after), "utf-8")
    assert not drawing.is_up_to_date(source, changed)


def test_a_shift_is_seen(drawn, tmp_path):
    moved = tmp_path / "moved.svg"
    text = drawn["schedule_2_of_5.svg"].read_text("utf-8")
    x = re.search(r"rotate\(-0 ([\d.]+) [\d.]+\)\">B3<", text)[1]
    moved.write_text(text.replace(f"rotate(-0 {x}", f"rotate(-0 {float(x) + 10}"), "utf-8")
    assert not drawing.is_up_to_date(drawn["schedule_2_of_5.svg"], moved)


def test_a_moved_value_is_seen(drawn, tmp_path):
    """Of a curve without texts: its markers say what was measured."""
    moved = tmp_path / "moved.svg"
    text = drawn["links.svg"].read_text("utf-8")
    y = re.findall(r"<use [^>]* y=\"([\d.]+)\"", text)[-1]
    moved.write_text(text.replace(f'y="{y}"', f'y="{float(y) + 2}"'), "utf-8")
    assert not drawing.is_up_to_date(drawn["links.svg"], moved)


def test_drawing_is_deterministic(drawn, tmp_path):
    for path in figures.write(tmp_path):
        assert path.read_bytes() == drawn[path.name].read_bytes()


@pytest.mark.parametrize("path", SVGS, ids=lambda path: path.stem)
def test_small_transparent_and_without_a_date(path):
    text = path.read_text("utf-8")
    assert len(text) < 50_000
    assert "<dc:date>" not in text
    background = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', text)
    assert background is None or background[1] == "fill: none"


def test_full_overlap_and_stalls():
    by_name = {name: {text for text, _, _ in drawing.texts(path)} for name, path in ((p.stem, p) for p in SVGS)}
    assert "stall" not in by_name["schedule_2_of_5"]
    assert "peak 3.00 GiB" in by_name["schedule_2_of_5"]
    assert "stall" in by_name["schedule_3_of_5"]
    assert "peak 2.00 GiB" in by_name["schedule_3_of_5"]
    assert {"RESIDENT", "OFFLOADING", "OFFLOADED", "RELOADING", "RELOADED"} <= by_name["states"]


def test_check_fails_on_a_stale_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("schedule_2_of_5", "states")})
    figures.write(tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    figures.main()
    (tmp_path / "states.svg").unlink()
    with pytest.raises(SystemExit, match=r"^out of date: states\.svg; run python tools/pages/figures\.py and commit"):
        figures.main()
