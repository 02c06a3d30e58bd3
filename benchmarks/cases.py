"""The suite's workloads, and which ways are compared on each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.models import Llama, Model, Stack
from benchmarks.workloads import norm_mlp, reference_decoder

LONG_TOKENS, LONG_LAYERS = 180_224, 4
"""A forward of the decoder's layer on so many tokens takes an H200 1.1 times as long as its link takes to copy what the
layer saves."""


@dataclass(frozen=True)
class Case:
    """A workload and what is compared on it."""

    name: str
    build: Callable[[torch.device], Model]
    ks: tuple[int, ...]
    """Numbers of layers that this library offloads."""
    checkpoint_ks: tuple[int, ...]
    """Numbers of checkpointed layers whose inputs it offloads."""
    te_ks: tuple[int, ...]
    """Numbers of layers that Transformer Engine offloads."""
    turns_s: float = 0
    """About how long contenders take turns, in seconds; 0 measures one after the other."""
    compiled: bool = False
    tokens: int | None = None
    """Length of the long sequence, whose steps take seconds."""


def cases(*, small: bool = False) -> dict[str, Case]:
    """The workloads by their names on the command line; ``small`` ones fit a CPU."""
    decoder, mlp = reference_decoder(small=small), norm_mlp(small=small)
    llama = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 16, "num_attention_heads": 32}
    llama_tokens, vocabulary, dtype, compiler = 4096, 2048, torch.bfloat16, "inductor"
    long = replace(decoder, layers=LONG_LAYERS, shape=(1, LONG_TOKENS, decoder.shape[2]))
    if small:
        decoder, mlp = replace(decoder, layers=4), replace(mlp, layers=4)
        llama = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
        llama_tokens, vocabulary, dtype, compiler = 64, 128, torch.float32, "aot_eager"
        long = replace(long, shape=(1, 256, 64))

    def llama_model(device: torch.device) -> Model:
        return Llama(device, tokens=llama_tokens, dtype=dtype, vocab_size=vocabulary, **llama)

    def compiled(device: torch.device) -> Model:
        return Stack(decoder, device, compiled=compiler)

    def long_stack(device: torch.device) -> Model:
        return Stack(long, device, loss_is_a_layer=True)

    all_but_one = (LONG_LAYERS - 1,)
    found = {
        "decoder": Case("decoder", lambda on: Stack(decoder, on), (2, 5, 10, 14, 18), (18, 19), (5, 18), turns_s=45),
        "long": Case("long sequence", long_stack, all_but_one, all_but_one, all_but_one, tokens=long.shape[1]),
        "compiled": Case("compiled decoder", compiled, (5, 10, 18), (18, 19), (5, 18), turns_s=16, compiled=True),
        "llama": Case("Hugging Face Llama", llama_model, (4, 8, 14), (14, 15), (4, 14), turns_s=15),
        "norm_mlp": Case("LayerNorm-MLP", lambda on: Stack(mlp, on), (2, 5, 10, 18), (18, 19), (5, 18), turns_s=30),
    }
    if small:
        few = {"ks": (1, 2), "checkpoint_ks": (2,), "te_ks": (1,), "turns_s": 1e-9}
        found = {name: case if case.tokens else replace(case, **few) for name, case in found.items()}
        found["llama"] = replace(found["llama"], ks=(1,))
    return found
