"""The picture of a busy cache with and without the engine's events, which lag behind what the engine does."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from bench.sim.blocks import Allocation, BlockPool
from cache.blocks import pack_ids
from cache.event_blocks import EventBlocks
from cache.kv_events import BlockRemoved, BlockStored, KvEvent
from cache.residency import Lease, Residency

BLOCK = 8
BLOCKS = 64
REQUESTS = 600
MASK = (1 << 64) - 1


class TellingPool(BlockPool):
    """A block pool that tells what it does as vLLM does: evictions as they are made, blocks as they are hashed."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self.salts: dict[int, str] = {}
        super().__init__(BLOCKS, BLOCK)

    def start(self, prompt: list[int], salt: str = "") -> Allocation | None:  # type: ignore[override]
        self.salts[hash(("root", salt))] = salt
        return super().start(prompt, salt)

    def _take(self, allocation: Allocation, count: int) -> None:
        free = list(self._free)[:count]
        gone = [self._hash_of[block] for block in free if block in self._hash_of]
        super()._take(allocation, count)
        self.events += [BlockRemoved((key & MASK,)) for key in gone]

    def _hash_whole_blocks(self, allocation: Allocation, computed_tokens: int) -> None:
        while allocation.hashed_blocks < computed_tokens // self.block_size:
            at, parent = allocation.hashed_blocks, allocation.parent
            super()._hash_whole_blocks(allocation, (at + 1) * self.block_size)
            ids = list(allocation.tokens[at * BLOCK : (at + 1) * BLOCK])
            salt = self.salts[parent] if at == 0 else ""
            self.events.append(
                BlockStored(
                    (allocation.parent & MASK,), None if at == 0 else parent & MASK, pack_ids(ids), BLOCK, salt
                )
            )


@dataclass(eq=False)
class Request:
    prompt: list[int]
    salt: str
    lease: Lease
    output: list[int]
    streamed: bool
    allocation: Allocation | None = None
    done: int = 0
    told: int = 0
    released: bool = False
    keep: list[int] = field(default_factory=list)


def predicted(seed: int, *, events: bool, clients: int, named: bool) -> tuple[int, int]:
    """(exact, all): an engine that works in steps, and a gateway that sees all of it a moment later."""
    draw = random.Random(seed)
    pool, residency = TellingPool(), Residency(BLOCK, BLOCKS - 1)
    blocks = EventBlocks(residency)
    if events:
        residency.told.start([])
        residency.told_all = True
    chunks = [[draw.randrange(50_000) for _ in range(draw.randint(6, 40))] for _ in range(10)]
    past: list[tuple[str, list[int]]] = []
    running: list[Request] = []
    waiting: deque[Request] = deque()
    ended: list[Request] = []
    arriving: deque[Request] = deque()
    exact = done = sent = 0
    while done < REQUESTS:
        # The gateway: what has come since, in the order in which it came; then new requests.
        for request in ended:
            residency.reconcile(request.lease, request.keep[0])
            residency.answered(request.lease, len(request.output), request.output if named else None)
            residency.end(request.lease)
            past.append((request.salt, [*request.prompt, *request.output]))
            exact += request.lease.cached_tokens == request.keep[0]
            done += 1
        del past[:-10]
        ended.clear()
        open_requests = len(running) + len(waiting) + len(arriving)
        while open_requests < clients and sent < REQUESTS + clients:
            if past and draw.random() < 0.5:
                salt, prompt = draw.choice(past)
                prompt = [*prompt, *(draw.randrange(50_000) for _ in range(draw.randint(1, 12)))]
                if len(prompt) > 80:
                    prompt = prompt[:60]
            else:
                salt = draw.choice("ab")
                prompt = [i for chunk in draw.sample(chunks, draw.randint(1, 2)) for i in chunk]
            output = [draw.randrange(50_000) for _ in range(draw.randint(1, 24))]
            arriving.append(Request(prompt, salt, residency.begin(prompt, salt), output, draw.random() < 0.8))
            open_requests += 1
            sent += 1
        # The engine: a step, with what arrived in time for it.
        while arriving and draw.random() < 0.7:
            waiting.append(arriving.popleft())
        for request in running:
            assert request.allocation is not None
            request.allocation.tokens.append(request.output[request.done])
            request.done += 1
            assert pool.extend(request.allocation, len(request.prompt) + request.done - (request.done == 0))
        while waiting:
            allocation = pool.start(waiting[0].prompt, waiting[0].salt)
            if allocation is None:
                break
            request = waiting.popleft()
            request.allocation = allocation
            request.keep = [allocation.cached_tokens]
            pool.extend(allocation, len(request.prompt))
            running.append(request)
        told, pool.events = pool.events, []
        if events:
            blocks.apply(0, told)
        for request in list(running):
            assert request.allocation is not None
            if request.streamed and not request.lease.ran:
                residency.generated(request.lease, ())
            if request.done >= len(request.output) - 1:
                running.remove(request)
                pool.release(request.allocation)
                ended.append(request)
            elif request.streamed and draw.random() < 0.8:
                # The token that the engine is at counts as well.
                residency.answered(request.lease, request.done + 2)
        draw.shuffle(ended)
    return exact, done


@pytest.mark.parametrize("seed", range(4))
def test_one_client_after_the_other_is_predicted_exactly_with_events_that_name_the_answers(seed: int) -> None:
    exact, done = predicted(seed, events=True, clients=1, named=False)
    assert exact == done


@pytest.mark.parametrize("seed", range(4))
def test_one_client_after_the_other_is_predicted_exactly_without_events_where_answers_are_named(seed: int) -> None:
    exact, done = predicted(seed, events=False, clients=1, named=True)
    assert exact == done


@pytest.mark.parametrize("seed", range(4))
def test_of_four_clients_at_once_events_put_right_what_timing_made_wrong(seed: int) -> None:
    without, done = predicted(seed, events=False, clients=4, named=True)
    told, _ = predicted(seed, events=True, clients=4, named=True)
    assert without / done >= 0.9
    assert told >= without
    assert told / done >= 0.995
