# %% after graphs-05
if on_cuda:
    assert busy_ms < eager_ms

# %% after graphs-09
assert len(pinned) == 3
assert len(set(pinned)) == 1

# %% after graphs-13
assert identical == [True] * 5

# %% after graphs-15
if on_cuda:
    assert handle.stats() == before

# %% after graphs-17
peak_mib = {(row["mode"], row["offloaded layers"]): row["peak MiB"] for row in rows}
saved_mib = {mode: peak_mib[mode, 0] - peak_mib[mode, OFFLOADED] for mode, k in peak_mib if k}
if on_cuda:
    assert ms["graph", OFFLOADED] < ms["eager", OFFLOADED]
    assert abs(saved_mib["graph"] / saved_mib["eager"] - 1) < 0.1, "a graph saves what eager mode saves"
else:
    assert saved_mib["eager"] > 0

# %% after graphs-24
assert all(map(torch.equal, wrong, old))
assert all(map(torch.equal, right, eager_gradients()))


def refused(mistake):
    """Whether a capture is refused with the library's own error."""
    try:
        mistake()
    except offload.CaptureError:
        return True
    finally:
        cuda.synchronize()
    return False


# %% after graphs-26
def no_warm_up():
    offload.empty_host_cache(device)
    with offload.offload_layers(layers, OFFLOADED, min_bytes=min_bytes):
        capture(step)


assert refused(no_warm_up) == on_cuda

# %% after graphs-28
assert all(map(torch.equal, gradients(again.replay, layers), eager_gradients()))


# %% after graphs-30
def backward_alone():
    with offload.offload_layers(layers, OFFLOADED, min_bytes=min_bytes):
        warm_up(step)
        with cuda.stream(stream):
            loss = forward(layers)
        capture(loss.backward)


assert refused(backward_alone) == on_cuda
assert all(map(torch.equal, gradients(graph.replay, layers), eager_gradients()))

# %% after graphs-32
if on_cuda:
    assert child.returncode != 0
    assert "captur" in child.stderr
