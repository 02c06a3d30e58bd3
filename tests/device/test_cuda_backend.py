"""What the CUDA backend does that PyTorch's streams alone would not."""

import pytest
import torch

from offload.device.select import get_backend

pytestmark = pytest.mark.gpu

COPIES = 8
TRIES = 5  # other processes may have the GPU meanwhile, and a number may come later, or a copy


@pytest.mark.parametrize("gives_way", [True, False])
def test_a_number_that_the_program_reads_does_not_wait_for_all_copies_of_a_stream_that_gives_way(
    gives_way: bool,
) -> None:
    """Without giving way it does, which is why there is such a method: if that fails, the method can go."""
    backend, number = get_backend("cuda"), torch.ones((), device="cuda")
    stream = backend.new_stream("state")
    memory, host = torch.zeros(1 << 24, device="cuda"), torch.zeros(1 << 24).pin_memory()
    number.item()  # the first takes longer than all copies
    backend.copy(stream, host, memory)
    waited = []
    for _ in range(TRIES):
        torch.cuda.synchronize()
        for _ in range(COPIES):
            if gives_way:
                backend.give_way(stream)
            backend.copy(stream, host, memory)
        copied = stream.record_event()
        assert number.item() == 1
        waited.append(copied.query())
    torch.cuda.synchronize()
    assert not all(waited) if gives_way else any(waited)
