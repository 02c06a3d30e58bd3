"""The script that brings the browser finds those that the tests find, and says what to do where it cannot."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "get_browser.sh"


def run(folder: Path, ci: str, *programs: str) -> subprocess.CompletedProcess[str]:
    """With no programs on the path but those, and ``id``, which says that nobody is root."""
    for name in ("id", *programs):
        (folder / name).write_text("#!/bin/sh\necho 1000\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), "CI": ci}
    bash = shutil.which("bash")
    assert bash
    return subprocess.run([bash, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)


def test_what_the_tests_find_is_enough(browser_names: tuple[str, ...], tmp_path: Path) -> None:
    for name in browser_names:
        folder = tmp_path / name
        folder.mkdir()
        done = run(folder, "true", name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_without_one_ci_fails_and_others_are_told(ci: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, ci, "apt-get")
    assert done.returncode == code
    assert done.stderr == "No browser here: tests of the site need Chromium (on Debian: apt install chromium).\n"
