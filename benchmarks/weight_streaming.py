"""Weight streaming: a decoder that does not fit, against the limits of the device and of the link.

    python -m benchmarks.weight_streaming --out results/weight_streaming.json

First the step with all weights on the device, which gives the compute time of each phase. Then the device's memory is
limited to less than half of the weights, and the same step runs streamed, for a number of tokens where compute
binds and for one where the link binds. A step's limit is, for forward and backward by themselves, the larger of the
compute time and the time in which the link alone moves the same bytes in both directions; all three are measured in
this run. FSDP2 with ``CPUOffloadPolicy`` does the same work under the same memory limit. At the end, the same model
and a small one are trained for 20 steps both ways, without a limit, and the losses are compared. The optimizer's step
is computed by the host in one and by the device in the other, so there is a third way: weights on the device, step on
the host.
"""

import argparse
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks.instruments import BLOCKING_CALLS, limit_memory, peak_bytes, reset_peak, synchronize, timed
from benchmarks.report import asked, environment, table, write
from benchmarks.weight_losses import TRAINED, loss_curves
from benchmarks.weight_steps import LARGE, SMALL, Size, Stack, Step, Times
from offload.device.select import get_backend
from offload.host.page_locked import page_locked

GB = 1e9
SHOWN = ("tokens", "step_s", "limit_s", "ratio_to_limit", "fsdp_s", "peak_device_bytes", "loads_per_step")
"""What is printed of a row."""


def copy_s(device: torch.device, nbytes: int, h2d: int, d2h: int) -> float:
    """Seconds in which the link alone moves so many pieces of ``nbytes`` bytes, both directions at once."""
    backend = get_backend(device)
    d2h_stream, h2d_stream = backend.copy_streams
    on_device = [backend.empty(nbytes).zero_() for _ in range(2)]
    on_host = [page_locked(nbytes, backend) for _ in range(2)]
    synchronize(device)

    def run() -> float:
        begin = time.perf_counter()
        for number in range(max(h2d, d2h)):
            if number < h2d:
                backend.copy(h2d_stream, on_device[0], on_host[0])
            if number < d2h:
                backend.copy(d2h_stream, on_host[1], on_device[1])
        for stream in (d2h_stream, h2d_stream):
            stream.record_event().synchronize()
        return time.perf_counter() - begin

    run()
    return statistics.median(run() for _ in range(3))


def resident_bytes() -> int:
    """Host memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def blocking_calls(step: Step) -> dict[str, int]:
    """Calls that block host or device, from the step's begin until backward has reached the input, by name.

    Two other steps come first: what was allocated since the last one has moved PyTorch's blocks about.
    """

    def mark(_: torch.Tensor) -> None:
        with torch.profiler.record_function("end of backward"):
            pass

    for _ in range(2):
        step.zero_grad()
        step()
    handle = step.x.register_hook(mark)
    step.zero_grad()
    synchronize(step.x.device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
    handle.remove()
    events = profiler.events()
    end = min(event.time_range.start for event in events if event.name == "end of backward")
    found: dict[str, int] = {}
    for event in events:
        if event.name in BLOCKING_CALLS and event.time_range.start < end:
            found[event.name] = found.get(event.name, 0) + 1
    return found


def streamed_rows(
    size: Size, model: Stack, alone: dict[str, Times], device: torch.device, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The streamed steps with their limits, and what else was seen."""
    rows = []
    before = resident_bytes()
    begin = time.perf_counter()
    with offload.stream_weights(model.layers, device, num_slots=arguments.slots) as handle:
        extra: dict[str, Any] = {"setup_s": time.perf_counter() - begin}
        limit_memory(device, arguments.memory * handle.stats().weight_bytes)
        layers = len(model.layers)
        layer_bytes = handle.stats().weight_bytes // layers
        for name, shape, offloaded in cases(size):
            model.offload(offloaded, device)
            step = Step(model, size.inputs(shape, device))
            first_s = timed(step, device)
            then, moved = handle.stats(), activation_bytes(model)
            reset_peak(device)
            times = step.measure(warmup=1, repeats=arguments.repeats)
            most_bytes = peak_bytes(device)
            now, count = handle.stats(), arguments.repeats + 1
            out, back = ((new - old) / count for new, old in zip(activation_bytes(model), moved, strict=True))
            loads = (now.loads - then.loads) / count
            back_pieces = round(loads - layers + back / layer_bytes)
            link_forward_s = copy_s(device, layer_bytes, layers, round(out / layer_bytes))
            link_backward_s = copy_s(device, layer_bytes, back_pieces, layers)
            compute_forward_s, compute_backward_s = alone[name].medians()
            limit_s = max(compute_forward_s, link_forward_s) + max(compute_backward_s, link_backward_s)
            forward_s, backward_s = times.medians()
            rows.append(
                {
                    "case": name,
                    "tokens": shape[0] * shape[1],
                    "step_s": times.step_s,
                    "forward_s": forward_s,
                    "backward_s": backward_s,
                    "compute_forward_s": compute_forward_s,
                    "compute_backward_s": compute_backward_s,
                    "link_forward_s": link_forward_s,
                    "link_backward_s": link_backward_s,
                    "limit_s": limit_s,
                    "ratio_to_limit": times.step_s / limit_s,
                    "loads_per_step": loads,
                    "late_loads_per_step": (now.late_loads - then.late_loads) / count,
                    "peak_device_bytes": most_bytes,
                    "first_s": first_s,
                    "times": vars(times),
                }
            )
            if device.type == "cuda":
                extra[f"blocking_calls_{name}"] = blocking_calls(step)
            if name == "few":
                extra["accumulating_s"] = accumulating_s(step, device)
                stats = handle.stats()
                extra["host_bytes"] = resident_bytes() - before
                accounted = stats.weight_bytes + stats.gradient_host_bytes + stats.staging_bytes
                extra["host_ratio"] = extra["host_bytes"] / accounted
                extra["staging_waits"] = stats.staging_waits
            else:
                extra["stats"] = vars(handle.stats())  # steps in backward free the gradients on the host
                extra |= optimizer_steps(step, device)
            step.zero_grad()
    return rows, extra


def accumulating_s(step: Step, device: torch.device) -> float:
    """Seconds of a microbatch whose gradients are added to those of an earlier one."""
    return statistics.median(timed(step, device) for _ in range(3))


def optimizer_steps(step: Step, device: torch.device) -> dict[str, float]:
    """Seconds of a step with an SGD step on the host after backward, and with one on the device in backward."""
    optimizer = torch.optim.SGD(step.model.parameters(), lr=2.0**-20)

    def run() -> float:
        step.zero_grad()
        return timed(lambda: (step(), optimizer.step()), device)

    after_s = min(run() for _ in range(2))
    with offload.stream_optimizer(optimizer, in_backward=True):
        return {"optimizer_after_s": after_s, "optimizer_in_backward_s": min(run() for _ in range(2))}


def activation_bytes(model: Stack) -> tuple[int, int]:
    """Bytes of activations that went out and came back so far."""
    if not isinstance(model.context, offload.OffloadContext):
        return 0, 0
    stats = model.context.stats()
    return stats.offloaded_bytes, stats.reloaded_bytes


def cases(size: Size) -> list[tuple[str, tuple[int, int], int]]:
    """Name, shape of the input, number of layers whose inputs are offloaded."""
    return [("few", size.few, 0), ("many", size.many, size.offloaded)]


def fsdp_rows(size: Size, model: Stack, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The same steps with FSDP2's CPU offload, where they do not run out of memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=device)
    for layer in [*model.layers, model]:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=True))
    rows = []
    for name, shape, offloaded in cases(size):
        row: dict[str, Any] = {"case": name, "tokens": shape[0] * shape[1]}
        model.offload(offloaded, device)
        step = Step(model, size.inputs(shape, device))
        try:
            reset_peak(device)
            times = step.measure(warmup=1, repeats=repeats)
            row |= {"step_s": times.step_s, "peak_device_bytes": peak_bytes(device), "times": vars(times)}
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        step.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="Measure weight streaming against compute and link.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.45, help="device memory, as a fraction of the weights")
    arguments, device = asked(parser, "results/weight_streaming.json")
    size = SMALL if arguments.small else LARGE
    link = offload.measure_link(device)
    print(link)

    model = Stack(size.build(device))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(f"{parameters / 1e9:.2f} billion parameters, {weight_bytes / GB:.2f} GB")
    alone = {}
    for name, shape, _ in cases(size):
        step = Step(model, size.inputs(shape, device))
        alone[name] = step.measure(warmup=2, repeats=arguments.repeats)
        step.zero_grad()
        del step
    rows, extra = streamed_rows(size, model, alone, device, arguments)
    gc.collect()
    fsdp: list[dict[str, Any]] = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        fsdp = fsdp_rows(size, model, device, min(arguments.repeats, 3))
    for row in rows:
        other = next((r for r in fsdp if r["case"] == row["case"]), {})
        row["fsdp_s"] = other.get("step_s")
        row["faster_than_fsdp"] = row["fsdp_s"] / row["step_s"] if row["fsdp_s"] else None
    del model
    trained, steps = (SMALL, 3) if arguments.small else (TRAINED, 20)
    curves = loss_curves(size, trained, device, steps)
    print(table([{key: row[key] for key in SHOWN} for row in rows]))
    for row in fsdp:
        if "error" in row:
            print(f"FSDP2, {row['case']}: {row['error']}")
    print(table([{key: value for key, value in row.items() if key != "losses"} for row in curves]))
    for key, value in extra.items():
        print(f"{key}: {value}")
    write(
        arguments.out,
        {
            **environment(device),
            "small": arguments.small,
            "link": vars(link),
            "parameters": parameters,
            "weight_bytes": weight_bytes,
            "memory_limit_bytes": arguments.memory * weight_bytes,
            "rows": rows,
            "fsdp": fsdp,
            "loss_curves": curves,
            **extra,
        },
    )


if __name__ == "__main__":
    main()
