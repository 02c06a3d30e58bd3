"""The README as a package shows it: without pictures, links into the repository and lists of its pages.

Hatchling calls it when it builds a wheel or an sdist, see ``pyproject.toml``.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r":?(\n*)!\[[^\]]*\]\([^)]*\)\n*")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")
GUIDE = re.compile(r"More results:.*?\n\n|## Documentation\n.*", re.DOTALL)
"""Lists of pages of the repository."""
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def package_readme(text: str) -> str:
    """The text of a package's page."""
    return LINK.sub(r"\1", PICTURE.sub(r".\1", GUIDE.sub("", COMMENT.sub("", text))))


class ReadmeHook(MetadataHookInterface):
    """Adds the field ``readme`` to the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read the file and put it into ``metadata``."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": package_readme(text)}
