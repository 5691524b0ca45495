"""The picture of a replica's cache against the simulated engine's block pool, request by request."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.blocks import Allocation, BlockPool
from cache.blocks import block_hashes
from cache.residency import Lease, Residency, resident_path

SALTS = ("", "one", "two")


@dataclass(eq=False)
class Request:
    """One request in both: the pool's allocation (None while it waits) and the picture's lease."""

    prompt: list[int]
    salt: str
    lease: Lease
    allocation: Allocation | None = None
    reported: int | None = None
    output: list[int] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return max(len(self.prompt), len(self.prompt) + len(self.output) - 1)


class Engine:
    """Schedules as vLLM does on a `BlockPool`: first come first served; the latest is preempted for an answer."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            allocation = self.pool.start([*request.prompt, *request.output], request.salt)
            if allocation is None:
                return
            self.pool.extend(allocation, len(allocation.tokens))
            request.allocation = allocation
            if request.reported is None:
                request.reported = allocation.cached_tokens
            self.running.append(self.waiting.popleft())

    def generate(self, request: Request, ids: list[int]) -> None:
        assert request.allocation is not None
        request.output += ids
        request.allocation.tokens.extend(ids)
        while not self.pool.extend(request.allocation, request.computed_tokens):
            latest = self.running.pop()
            assert latest.allocation is not None
            self.pool.release(latest.allocation)
            latest.allocation = None
            self.waiting.appendleft(latest)
            if latest is request:
                return

    def finish(self, request: Request) -> None:
        if request.allocation is not None:
            self.running.remove(request)
            self.pool.release(request.allocation)
        else:
            self.waiting.remove(request)
        self.admit()


class Traffic:
    """Prompts that share beginnings in a few ways: chunks in any order, and conversations with their answers."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.random = random.Random(seed)
        sizes = [self.random.randint(1, 4 * block_size) for _ in range(8)]
        self.chunks = [[self.random.randrange(50_000) for _ in range(size)] for size in sizes]
        self.past: list[tuple[str, list[int]]] = []

    def prompt(self, most_tokens: int) -> tuple[str, list[int]]:
        draw = self.random
        if self.past and draw.random() < 0.5:
            salt, ids = draw.choice(self.past)
            ids = ids[: draw.randint(1, len(ids))] if draw.random() < 0.3 else list(ids)
        else:
            salt = draw.choice(SALTS)
            ids = [i for chunk in draw.sample(self.chunks, draw.randint(1, 4)) for i in chunk]
        if draw.random() < 0.7:
            ids = [*ids, *(draw.randrange(50_000) for _ in range(draw.randint(1, 20)))]
        return salt, ids[:most_tokens]

    def answer(self, most: int) -> list[int]:
        return [self.random.randrange(50_000) for _ in range(self.random.randint(1, most))]

    def keep(self, salt: str, ids: list[int]) -> None:
        self.past.append((salt, ids))
        del self.past[:-12]


@pytest.mark.parametrize("seed", range(8))
def test_serial_requests_are_predicted_exactly_while_blocks_are_evicted(seed: int) -> None:
    block_size, num_blocks = (4, 24) if seed % 2 else (8, 64)
    pool, residency = BlockPool(num_blocks, block_size), Residency(block_size, num_blocks - 1)
    traffic = Traffic(seed, block_size)
    for _ in range(800):
        salt, ids = traffic.prompt(num_blocks * block_size // 2)
        hashes = block_hashes(ids, block_size, salt) if traffic.random.random() < 0.5 else None
        prefix = residency.prefix(salt).extended(ids)
        lease = residency.begin(ids, salt, hashes)
        allocation = pool.start(ids, salt)
        assert allocation is not None
        assert prefix.cached_tokens() == lease.cached_tokens == allocation.cached_tokens
        pool.extend(allocation, len(ids))
        output = traffic.answer(3 * block_size)
        residency.generated(lease, output)
        allocation.tokens.extend(output)
        assert pool.extend(allocation, len(ids) + len(output) - 1)
        residency.reconcile(lease, allocation.cached_tokens)
        residency.end(lease)
        pool.release(allocation)
        traffic.keep(salt, [*ids, *output])
    counts = residency.counts()
    assert counts.exact == 800
    assert counts.evictions == pool.evictions > 300
    assert counts.predicted_tokens == counts.reported_tokens > 0
    assert counts.resident_blocks < num_blocks


@pytest.mark.parametrize("seed", range(12))
def test_overlapping_requests_are_predicted_exactly_while_they_wait_and_are_preempted(seed: int) -> None:
    block_size, num_blocks = (4, 24) if seed % 2 else (8, 40)
    engine, residency = Engine(num_blocks, block_size), Residency(block_size, num_blocks - 1)
    traffic, draw = Traffic(seed, block_size), random.Random(seed)
    open_requests: list[Request] = []
    preempted = waited = finished = 0
    while finished < 500:
        action = draw.random()
        if action < 0.35 and len(open_requests) < 6:
            salt, ids = traffic.prompt(num_blocks * block_size // 2)
            request = Request(ids, salt, residency.begin(ids, salt))
            open_requests.append(request)
            engine.waiting.append(request)
            engine.admit()
            waited += request.allocation is None
        elif action < 0.8 and engine.running:
            request = draw.choice(engine.running)
            ids = traffic.answer(6)
            if request.computed_tokens + len(ids) < (num_blocks - 1) * block_size:
                engine.generate(request, ids)
                residency.generated(request.lease, ids)
                preempted += request not in engine.running
        elif engine.running:
            request = draw.choice(engine.running)
            assert request.lease.cached_tokens == request.reported
            residency.reconcile(request.lease, request.reported)
            residency.end(request.lease)
            engine.finish(request)
            open_requests.remove(request)
            traffic.keep(request.salt, [*request.prompt, *request.output])
            finished += 1
    counts = residency.counts()
    assert counts.exact == 500
    assert counts.evictions == engine.pool.evictions
    assert waited > 0
    assert preempted > 0


def run(residency: Residency, ids: list[int]) -> None:
    lease = residency.begin(ids)
    residency.generated(lease, [])
    residency.end(lease)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12),
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12),
    st.integers(1, 5),
)
def test_a_prefix_followed_in_pieces_finds_what_the_whole_prompt_would_hit(
    sent: list[list[int]], pieces: list[list[int]], block_size: int
) -> None:
    residency = Residency(block_size, 200)
    for index in range(len(sent)):
        run(residency, [i for piece in sent[index:] for i in piece])
    prefix, ids, steps = residency.prefix(), list[int](), []
    for piece in pieces:
        prefix = prefix.extended(piece)
        ids += piece
        assert prefix == residency.prefix().extended(ids)
        assert prefix.tokens == len(ids)
        steps.append((prefix.cached_tokens(), list(ids)))
    # Each in a fresh picture: a request leaves its own blocks behind.
    for cached_tokens, beginning in steps:
        again = Residency(block_size, 200)
        for index in range(len(sent)):
            run(again, [i for piece in sent[index:] for i in piece])
        assert again.begin(beginning).cached_tokens == cached_tokens


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_resident_path_is_the_best_of_all_orders(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 4))
    pieces = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=4))
    residency = Residency(block_size, 200)
    for order in data.draw(st.lists(st.permutations(range(len(pieces))), max_size=3)):
        run(residency, [9, 9, *(i for index in order for i in pieces[index])])
    prefix = residency.prefix().extended([9, 9])
    path = resident_path(prefix, pieces, most_tries=10_000)
    assert len(set(path)) == len(path)

    def resident(order: tuple[int, ...]) -> int:
        return prefix.extended([i for index in order for i in pieces[index]]).resident_tokens

    best = max(resident(order) for order in itertools.permutations(range(len(pieces))))
    assert resident(path) == best
    assert path == () or resident(path) > prefix.resident_tokens
