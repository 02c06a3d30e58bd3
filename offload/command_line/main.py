"""The command line: ``python -m offload plan``, or ``offload plan``. Its options, and the exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from offload import __version__
from offload.base.checks import parse_bytes
from offload.command_line.plan import RATES, answer_plan


def main(words: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, or the process's, and write its answer to standard output.

    The exit status is 0, or 1 if nothing fits, or 2 with one line on standard error for what cannot be answered.
    """
    options = read_options(sys.argv[1:] if words is None else words)
    try:
        text, values = answer_plan(options)
    except (ImportError, ValueError, TypeError, OSError) as error:
        sys.stderr.write(f"offload plan: {error}\n")
        return 2
    sys.stdout.write(json.dumps(values, indent=1) if options.json else text)
    sys.stdout.write("\n")
    return 0 if values["ok"] else 1


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command, by name; wrong ones, help and the version exit."""
    parser = argparse.ArgumentParser("offload", description="Ask about a model before a line of code is written.")
    parser.add_argument("--version", action="version", version=f"offload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = (answer_plan.__doc__ or "").partition("\n")[0]
    add = commands.add_parser("plan", help=text, description=text).add_argument
    add("model", help="the path of a Hugging Face config.json or of its folder, or a model type such as llama")
    add("--json", action="store_true", help="answer as JSON, for programs")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the config, in place of its value")
    add("--lora", type=int, metavar="RANK", help="train LoRA's adapters on all linear layers, and nothing else")
    add("--tokens", type=int, default=4096, help="tokens of a sequence; 4096 by default")
    add("--batch", type=int, default=1, help="sequences in a microbatch; 1 by default")
    add("--memory", type=_size, help="device memory, such as 24GiB; by default that of this machine's GPU")
    add("--host-memory", type=_size, help="host memory that may be used, such as 100GiB; no limit by default")
    add("--link", type=_size, help="bytes per second each way, such as 26GB; an H200's by default")
    rates = "per second inside of layers; by default an H200's"
    add("--flops", type=float, default=RATES.flop_per_s, help=f"FLOP {rates}, 630e12")
    add("--bandwidth", type=float, default=RATES.bytes_per_s, help=f"bytes of device memory {rates}, 4e12")
    state = "bytes of optimizer state per parameter; by default AdamW's two numbers of the dtype"
    add("--optimizer-bytes", type=int, help=state)
    add("--fused-loss", action="store_true", help="the loss never holds all logits: offload.use_chunked_loss, Liger's")
    return parser.parse_args(words)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("value ")) from None
