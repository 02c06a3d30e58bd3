"""The commands of ``python -m offload``: their options, and where their answers go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from offload.command_line import doctor, link, plan
from offload.host.page_locked import HostMemoryError
from offload.planning.as_json import to_json

COMMANDS: dict[str, ModuleType] = {"link": link, "doctor": doctor, "plan": plan}
"""The file of each: it has ``add_options`` and ``answer``, and its docstring begins with the help of the command."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, and write its answer to standard output.

    Args:
        words: What stands behind ``python -m offload``; from the command line if left out.

    Returns:
        The exit status: 0 if all is well, 1 if the answer says that it is not. What is wrong with the options, or
        cannot be done here, is one line on standard error and 2.
    """
    options = _parser().parse_args(words)
    try:
        answer = COMMANDS[options.command].answer(options)
    except (ValueError, TypeError, OSError, HostMemoryError) as error:
        sys.stderr.write(f"offload {options.command}: {error}\n")
        return 2
    text = to_json(options.command, {"ok": answer.ok} | answer.values) if options.json else str(answer)
    sys.stdout.write(f"{text}\n")
    return 0 if answer.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m offload", description="Ask about this machine, and about a model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").partition("\n")[0]
        options = commands.add_parser(name, help=text, description=text)
        command.add_options(options)
        options.add_argument("--json", action="store_true", help="answer as JSON, for programs")
    return parser
