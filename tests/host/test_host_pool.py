"""The host pool: buffers never overlap, it grows no further than what is used, and nobody waits for it."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from faults import in_threads, slowly
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.host import pool as host_pool
from offload.host.page_locked import HostMemoryError
from offload.host.pool import BUFFER_ALIGNMENT_BYTES, PAGE_BYTES, HostBuffer, HostPool

KIB = 1 << 10


class FakeEvent:
    """An event that is reached when the test says so."""

    def __init__(self, *, reached: bool = False) -> None:
        self.reached = reached
        self.waited_for = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited_for = self.reached = True


REACHED = FakeEvent(reached=True)


class Source:
    """Gives pageable memory in place of pinned and remembers the sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def pool(source: Source) -> HostPool:
    return HostPool(source)


def rounded(nbytes: int) -> int:
    return -(-nbytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES


def blocks(buffer: HostBuffer) -> list[tuple[int, int]]:
    """The aligned blocks of memory under a buffer."""
    return [
        (piece.slab.data_ptr(), start)
        for piece in buffer.ranges
        for start in range(piece.start, piece.start + piece.nbytes, BUFFER_ALIGNMENT_BYTES)
    ]


# Traces: take a buffer of some size, give one of those that are out back, let time pass.

TAKE = st.tuples(st.just("take"), st.integers(1, 32 * KIB))
SAME = st.tuples(st.just("take"), st.sampled_from([512, 3000, 8 * KIB]))
GIVE = st.tuples(st.just("give"), st.integers(0, 1000))
REACH = st.tuples(st.just("reach"), st.integers(0, 1000))
TRIM = st.tuples(st.just("trim"), st.just(0))
Trace = list[tuple[str, int]]


class Replay:
    """Runs a trace and checks after each action what must hold at any time."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.out: list[tuple[HostBuffer, int]] = []
        self.pending: dict[tuple[int, int], FakeEvent] = {}
        self.events: list[FakeEvent] = []
        self.count = 0
        self.peak_bytes = 0

    def run(self, trace: Trace) -> None:
        for action, number in trace:
            getattr(self, action)(number)
            self.check()

    def take(self, nbytes: int) -> None:
        buffer = self.pool.take(nbytes)
        assert buffer.nbytes == nbytes == sum(len(piece) for piece in buffer.pieces)
        needed = {self.pending.pop(block) for block in blocks(buffer) if block in self.pending}
        assert {event for event in needed if not event.reached} <= set(buffer.events)
        self.count += 1
        mark = self.count % 251
        for piece in buffer.pieces:
            assert piece.dtype is torch.uint8
            piece.fill_(mark)
        self.out.append((buffer, mark))
        self.peak_bytes = max(self.peak_bytes, sum(rounded(out.nbytes) for out, _ in self.out))

    def give(self, which: int) -> None:
        if not self.out:
            return
        buffer, mark = self.out.pop(which % len(self.out))
        assert all(bool((piece == mark).all()) for piece in buffer.pieces), "another buffer wrote here"
        event = FakeEvent()
        self.events.append(event)
        self.pending.update(dict.fromkeys(blocks(buffer), event))
        self.pool.give(buffer, event)

    def reach(self, which: int) -> None:
        if self.events:
            self.events[which % len(self.events)].reached = True

    def trim(self, _: int) -> None:
        self.pool.trim()
        live = {piece.slab.data_ptr() for buffer, _ in self.out for piece in buffer.ranges}
        for block, event in list(self.pending.items()):
            if block[0] not in live:
                assert event.reached, "memory was freed before the last copy from it"
                del self.pending[block]

    def check(self) -> None:
        used = [block for buffer, _ in self.out for block in blocks(buffer)]
        assert len(used) == len(set(used)), "two buffers share memory"
        assert self.pool.pinned_bytes <= 1.03 * self.peak_bytes + PAGE_BYTES
        assert self.pool.used_bytes <= sum(buffer.nbytes for buffer, _ in self.out)

    def finish(self) -> None:
        """Everything comes back."""
        while self.out:
            self.give(0)
        self.trim(0)
        assert self.pool.used_bytes == self.pool.pinned_bytes == 0


@settings(deadline=None)
@given(trace=st.lists(st.one_of(TAKE, SAME, GIVE, GIVE, REACH, TRIM), min_size=25, max_size=80))
def test_any_trace(trace: Trace) -> None:
    replay = Replay(HostPool(Source()))
    replay.run(trace)
    replay.finish()


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(trace=st.lists(st.one_of(TAKE, SAME, GIVE), min_size=10, max_size=40))
def test_the_second_time_nothing_is_pinned(trace: Trace) -> None:
    source = Source()
    replay = Replay(HostPool(source))
    replay.run(trace)
    while replay.out:
        replay.give(0)
    pinned = len(source.sizes)
    replay.run(trace)
    assert len(source.sizes) == pinned


def test_only_who_covers_what_was_copied_waits_for_the_copy(pool: HostPool, source: Source) -> None:
    """The two buffers are cut into others: the first two lie where the copy runs, and the third begins behind it."""
    first, second = pool.take(PAGE_BYTES // 2), pool.take(PAGE_BYTES // 2)
    copied = FakeEvent()
    pool.give(first, copied)
    pool.give(second, REACHED)
    inside = [pool.take(PAGE_BYTES // 8), pool.take(PAGE_BYTES // 8 * 3)]
    behind = pool.take(PAGE_BYTES // 4)
    assert sum(source.sizes) == PAGE_BYTES
    assert [buffer.events for buffer in inside] == [(copied,), (copied,)]
    assert behind.events == ()


def test_reserve_pins_what_is_missing(pool: HostPool, source: Source) -> None:
    pool.reserve(100 * KIB)
    pool.reserve(50 * KIB)
    pool.reserve(104 * KIB)
    assert source.sizes == [100 * KIB, 4 * KIB]
    taken = [pool.take(26 * KIB) for _ in range(4)]
    assert pool.pinned_bytes == 104 * KIB
    assert taken


def test_a_large_reservation_comes_in_slabs_that_can_go_alone(
    pool: HostPool, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "RESERVE_BYTES", 64 * KIB)
    pool.reserve(200 * KIB + 1)
    assert sorted(source.sizes) == [8 * KIB + PAGE_BYTES, 64 * KIB, 64 * KIB, 64 * KIB]
    assert pool.pinned_bytes == sum(source.sizes)
    large = pool.take(100 * KIB)
    assert len(source.sizes) == 4
    assert pool.trim() == sum(source.sizes) - 2 * 64 * KIB
    assert large.nbytes == 100 * KIB


def test_a_trim_keeps_what_it_is_told_to(pool: HostPool) -> None:
    for taken in [pool.take(16 * KIB) for _ in range(4)]:
        pool.give(taken, REACHED)
    assert pool.trim(40 * KIB) == 32 * KIB  # whole slabs, until there is no more
    assert pool.pinned_bytes == 32 * KIB


def test_there_is_room_in_idle_memory(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "available_bytes", lambda: 10 * KIB)
    pool.give(pool.take(16 * KIB), REACHED)
    taken = pool.take(8 * KIB)
    assert pool.room_bytes() == (16 + 10) * KIB - taken.nbytes
    assert pool.room_bytes(20 * KIB) == 20 * KIB - taken.nbytes


def test_what_fits_the_limit_exactly_is_pinned(pool: HostPool) -> None:
    """Also where the pool would grow by more than what is missing."""
    limit = 64 * 64 * PAGE_BYTES
    pool.take(limit, limit)
    pool.take(PAGE_BYTES, limit + PAGE_BYTES)
    assert pool.pinned_bytes == limit + PAGE_BYTES
    with pytest.raises(HostMemoryError, match="beyond the pool's"):
        pool.take(1, limit + PAGE_BYTES)


def test_idle_memory_that_is_too_small_does_not_count_against_the_limit(pool: HostPool) -> None:
    limit = 64 * PAGE_BYTES
    small, kept = pool.take(16 * PAGE_BYTES), pool.take_whole([PAGE_BYTES])
    pool.give(small)
    [taken] = pool.take_whole([48 * PAGE_BYTES], limit)
    assert (taken.nbytes, pool.pinned_bytes) == (48 * PAGE_BYTES, 49 * PAGE_BYTES)
    with pytest.raises(HostMemoryError, match="beyond the pool's"):
        pool.take_whole([16 * PAGE_BYTES], limit)
    assert pool.used_bytes == taken.nbytes + kept[0].nbytes


def test_who_refused_is_asked_again_only_after_a_change(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        raise HostMemoryError("no more")

    pool.give(pool.take(8 * KIB), REACHED)
    monkeypatch.setattr(pool, "_allocate", refuse)
    for nbytes in (64 * KIB, 64 * KIB, 128 * KIB):
        with pytest.raises(HostMemoryError, match="no more"):
            pool.take(nbytes)
    assert asked == [56 * KIB]
    with pytest.raises(HostMemoryError, match="no more"):
        pool.take(32 * KIB)
    assert asked == [56 * KIB, 24 * KIB], "a smaller request may still fit"
    assert pool.used_bytes == 0
    taken = pool.take(8 * KIB)
    pool.trim()
    with pytest.raises(HostMemoryError, match="no more"):
        pool.reserve(64 * KIB)
    with pytest.raises(HostMemoryError, match="no more"):
        pool.take(64 * KIB)
    assert taken.nbytes == 8 * KIB
    assert asked == [56 * KIB, 24 * KIB, 56 * KIB, 64 * KIB]
    pool.trim()
    with pytest.raises(HostMemoryError, match="no more"):
        pool.take(64 * KIB)
    assert len(asked) == 5


class GivesWhenItDies:
    def __init__(self, pool: HostPool, nbytes: int) -> None:
        self.pool = pool
        self.buffer = pool.take(nbytes)
        self.cycle = self

    def __del__(self) -> None:
        self.pool.give(self.buffer, REACHED)


def test_what_dies_as_garbage_is_given_back_once(pool: HostPool) -> None:
    """The collector clears weak references first, calls finalizers next, and those of other threads run meanwhile."""
    taken: list[HostBuffer] = []

    class TakesFirst(GivesWhenItDies):
        def __del__(self) -> None:
            taken.append(self.pool.take(8 * KIB))
            super().__del__()

    TakesFirst(pool, 8 * KIB)
    gc.collect()
    taken.append(pool.take(8 * KIB))
    assert not set(blocks(taken[0])) & set(blocks(taken[1]))


def collect_and_allocate(nbytes: int) -> torch.Tensor:
    """The collector may run anywhere, also inside the pool with its lock held."""
    gc.collect()
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.timeout(30)
def test_take_in_a_finalizer_while_the_pool_is_busy() -> None:
    """A program's finalizer may run its layers, which would wait for ever for the lock that its own thread holds."""
    taken: list[HostBuffer] = []
    pool = HostPool(collect_and_allocate)

    class TakesWhenItDies:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            taken.append(pool.take(5 * KIB))

    TakesWhenItDies()
    taken.append(pool.take(50 * KIB))
    used = [block for buffer in taken for block in blocks(buffer)]
    assert len(taken) == 2
    assert len(used) == len(set(used))


def test_what_a_step_needs_is_pinned_in_its_thread() -> None:
    """A finalizer that the collector runs meanwhile may take a buffer: in another thread it would wait for the lock."""
    threads = []

    def allocate(nbytes: int) -> torch.Tensor:
        threads.append(threading.get_ident())
        return torch.empty(nbytes, dtype=torch.uint8)

    HostPool(allocate).take(5 * KIB)
    assert threads == [threading.get_ident()]


def test_give_does_not_wait_for_the_lock(pool: HostPool) -> None:
    buffer = pool.take(512)
    with pool._lock:
        in_threads(partial(pool.give, buffer, REACHED), patience_s=10)
    pool.trim()
    assert pool.used_bytes == 0


CALLS: dict[str, Callable[[HostPool], object]] = {
    "take": lambda pool: pool.take(8 * KIB),
    "take_whole": lambda pool: pool.take_whole([8 * KIB]),
    "trim": HostPool.trim,
    "reserve": lambda pool: pool.reserve(128 * KIB),
}
SLOW = (HostPool.take_whole, HostPool.trim, HostPool.reserve)
SLOW += (HostPool._take, HostPool._carve, HostPool._cut, HostPool._reclaim, HostPool._grow, HostPool._pin)


@pytest.mark.parametrize(("one", "other"), [*(("take", name) for name in CALLS), ("reserve", "reserve")])
def test_two_threads_at_the_same_time(one: str, other: str, pool: HostPool) -> None:
    """In slow motion, so that one would come in the midst of the other."""
    pool.give(pool.take(64 * KIB), REACHED)
    both = threading.Barrier(2)

    def call(name: str) -> None:
        sys.settrace(slowly(*SLOW, seconds=0.004))
        both.wait(10)
        CALLS[name](pool)

    in_threads(partial(call, one), partial(call, other))
    covered = [(id(piece.slab), piece.start, piece.end) for buffer in pool._buffers for piece in buffer.ranges]
    covered = sorted(covered + [(id(piece.slab), piece.start, piece.end) for piece in pool._free])
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(covered)), "they overlap"
    assert sum(end - start for _, start, end in covered) == pool.pinned_bytes
    assert other != "reserve" or pool.pinned_bytes == 128 * KIB


def test_whole_buffers_have_one_piece_and_share_slabs(pool: HostPool, source: Source) -> None:
    sizes = [5 * KIB, 3, 2 * KIB, 7 * KIB, 1]
    taken = pool.take_whole(sizes)
    assert [[len(piece) for piece in buffer.pieces] for buffer in taken] == [[size] for size in sizes]
    assert source.sizes == [4 * PAGE_BYTES]
    for mark, buffer in enumerate(taken):
        buffer.pieces[0].fill_(mark)
    assert all(bool((buffer.pieces[0] == mark).all()) for mark, buffer in enumerate(taken))


def test_whole_buffers_take_free_memory_first_and_wait_for_its_events(pool: HostPool, source: Source) -> None:
    first, other = pool.take(8 * KIB), pool.take(8 * KIB)
    assert len(source.sizes) == 2
    event, elsewhere = FakeEvent(), FakeEvent()
    pool.give(first, event)
    pool.give(other, elsewhere)
    [taken] = pool.take_whole([6 * KIB])
    assert event.waited_for
    assert not elsewhere.waited_for
    assert len(source.sizes) == 2
    pool.take_whole([4 * KIB, 12 * KIB])  # the second is longer than any free range
    assert source.sizes[2:] == [12 * KIB]
    assert taken.nbytes == 6 * KIB


def test_whole_buffers_that_the_limit_forbids_are_not_taken(pool: HostPool, source: Source) -> None:
    pool.give(pool.take(8 * KIB), REACHED)
    with pytest.raises(
        HostMemoryError, match=r"12\.00 KiB of pinned host memory are missing beyond the pool's 8\.00 KiB"
    ):
        pool.take_whole([4 * KIB, 12 * KIB], 12 * KIB)
    assert pool.used_bytes == 0
    assert len(source.sizes) == 1
    assert pool.take(8 * KIB).nbytes == 8 * KIB
    assert len(source.sizes) == 1, "all of it is free again"
