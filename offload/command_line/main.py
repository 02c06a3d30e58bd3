"""The commands of ``python -m offload``: their options, and where their answers go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from offload.command_line import doctor, link, plan
from offload.command_line.answer import Answer
from offload.host.page_locked import HostMemoryError


class Command(Protocol):
    """What the file of a command has; its docstring's first line is the command's help."""

    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Say which options there are beside ``--json``."""

    def answer(self, options: argparse.Namespace) -> Answer:
        """Do what was asked for; a ``ValueError`` says what is wrong with the options."""


COMMANDS: dict[str, Command] = {"link": link, "doctor": doctor, "plan": plan}


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
    sys.stdout.write(f"{answer.to_json() if options.json else answer}\n")
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
