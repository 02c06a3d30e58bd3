"""The page on the command line shows what the commands answer, but for the numbers."""

import doctest
import json
import re
import shlex
from pathlib import Path

import pytest

from offload.command_line.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/command_line.md"
BLOCKS = re.findall(r"```text\n\$ (.*)\n((?:.*\n)*?)```", PAGE.read_text("utf-8"))
LLAMA = {  # as many parameters in fewer layers, which takes less time to plan
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 8,
    "intermediate_size": 65536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def form(text: str) -> str:
    """Without numbers, and the units that depend on them."""
    text = re.sub(r"\d[\d.,]*(\+\w+)?", "0", text)
    text = re.sub(r"0 (ms|µs|s|B|[KMG]iB|GB|GB/s)\b", "0 unit", text)
    return " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_commands_answer_as_the_page_shows(command, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B/config.json").write_text(json.dumps(LLAMA))
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "offload", "plan"]
    main(words[3:])
    got, wanted = form(capsys.readouterr().out), form(shown)
    assert doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS), f"page: {wanted}\nreal: {got}"


def test_the_page_names_options_that_there_are(capsys):
    """Of the table of plan's."""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    table = PAGE.read_text("utf-8").partition("| option | says |")[2]
    named = set(re.findall(r"`(--[\w-]+)", table))
    assert named <= known
    assert len(named) > 5
