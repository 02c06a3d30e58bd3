"""The command line: ``python -m offload``, or ``offload``. Options of all commands, and the exit status."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload import __version__
from offload.base.checks import parse_bytes
from offload.command_line.answer import Answer
from offload.command_line.machine import answer_doctor
from offload.command_line.plan import answer_plan
from offload.host.page_locked import HostMemoryError
from offload.planning.profile import to_json

COMMANDS: dict[str, Callable[[argparse.Namespace], Answer]] = {"doctor": answer_doctor, "plan": answer_plan}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and write its answer to standard output.

    Args:
        words: The arguments of ``python -m offload``; by default those of the process.

    Returns:
        The exit status: 0 if all is well, 1 if the answer says that it is not. Wrong options, and what cannot be
        answered, are one line on standard error and 2.
    """
    options = read_options(sys.argv[1:] if words is None else words)
    try:
        answer = COMMANDS[options.command](options)
    except (ImportError, ValueError, TypeError, OSError, HostMemoryError) as error:
        sys.stderr.write(f"offload {options.command}: {error}\n")
        return 2
    text = to_json(options.command, {"ok": answer.ok} | answer.values) if options.json else str(answer)
    sys.stdout.write(f"{text}\n")
    return 0 if answer.ok else 1


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command, by name.

    Raises:
        SystemExit: An option is wrong, with status 2; or it asks for help or the version, with status 0.
    """
    parser = argparse.ArgumentParser("offload", description="Ask about this machine, and about a model.")
    parser.add_argument("--version", action="version", version=f"offload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adds = []
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").partition("\n")[0]
        adds.append(commands.add_parser(name, help=text, description=text).add_argument)
        adds[-1]("--json", action="store_true", help="answer as JSON, for programs")
    adds[0]("--device", type=_device, help="such as cuda:1; by default the current accelerator, or the CPU")
    add = adds[1]
    add("model", help="the path of a Hugging Face config.json or of its folder, or a model type such as llama")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the config, in place of its value")
    add("--lora", type=_count, metavar="RANK", help="train LoRA's adapters on all linear layers, and nothing else")
    add("--freeze", action="append", default=[], metavar="PATTERN", help="do not train the parameters with such names")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations, in place of the config's",
    )
    add("--tokens", type=_count, default=4096, help="tokens of a sequence; 4096 by default")
    add("--batch", type=_count, default=1, help="sequences in a microbatch; 1 by default")
    add("--memory", type=_size, help="device memory, such as 24GiB; by default that of this machine's GPU")
    add("--host-memory", type=_size, help="host memory that may be used, such as 100GiB; no limit by default")
    add("--link", type=_size, help="bytes per second each way, such as 26GB; an H200's by default")
    add("--flops", type=_rate, help="FLOP per second inside of layers; 630e12, an H200's, by default")
    add("--bandwidth", type=_rate, help="bytes per second of device memory; 4e12, an H200's, by default")
    state = "bytes of optimizer state per parameter; by default AdamW's two numbers of the dtype"
    add("--optimizer-bytes", type=_count_or_zero, help=state)
    add("--fused-loss", action="store_true", help="the loss never holds all logits: offload.use_chunked_loss, Liger's")
    return parser.parse_args(words)


def _reads(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except (RuntimeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("value ")) from None

    return read


def _number(wanted: str, least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not least <= found < math.inf:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return found

    return read


_device, _size = _reads(torch.device), _reads(parse_bytes)
_count = _number("a whole number, at least 1", 1, int)
_count_or_zero = _number("a whole number, at least 0", 0, int)
_rate = _number("a number above 0, such as 630e12", math.ulp(0.0), float)
