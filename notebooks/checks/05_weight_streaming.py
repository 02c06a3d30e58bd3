# %% after stream-07
assert late == 7

# %% after stream-14
assert all(map(torch.equal, *gradients))

# %% after stream-17
assert identical

# %% after stream-20
assert streamed.stats().loads % (2 * DEPTH - 2) == 0

# %% after stream-27
fits = True
try:
    [parameter.detach().to(device) for parameter in blocks.parameters()]
except torch.OutOfMemoryError:
    fits = False
torch.cuda.empty_cache()
assert fits != on_gpu, "where the limit is in force, the weights cannot fit"

# %% after stream-29
assert rows[-1]["loss"] < rows[0]["loss"]

# %% after stream-32
assert len(timeline.lane("d2h")) > LAYERS  # stepped weights of all blocks, inputs of most

# %% after stream-34
if on_gpu:
    assert held_bytes + meter.peak_bytes < FRACTION * weight_bytes
else:
    # Ordinary memory stands for both here, and the meter has seen optimizer's tensors and gradients.
    # So measure a forward, whose memory is the device's alone, and add the slots.
    with offload.memory_meter(device) as meter, torch.no_grad():
        loss_of(sequence)
    # At this size, activations count for more than the weights' share.
    assert streamed.stats().slot_bytes + meter.peak_bytes < weight_bytes
