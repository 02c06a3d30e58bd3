"""How much host memory the system can still give: what the machine has, within what the control group may use.

Linux promises more memory than there is, and kills a process that then touches it. So the library asks before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still touch without being killed; ``None`` where the system does not say.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    try:
        machine = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return None
    return max(0, min([machine, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group that the process is in has left; its file cache can be dropped."""
    for directory, (limit, usage, cache) in _groups(root):
        try:
            most, used = int((directory / limit).read_text()), int((directory / usage).read_text())
            fields = _fields(directory / "memory.stat")
        except (OSError, ValueError):  # not there, or "max"
            continue
        yield most - used + sum(fields.get(name, 0) for name in cache)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, files = mount, _V2
        elif "memory" in controllers.split(","):
            top, files = mount / "memory", _V1
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            yield top / part, files


def _fields(path: Path) -> dict[str, int]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
