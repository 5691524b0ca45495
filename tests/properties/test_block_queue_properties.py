"""Requests of unknown content that run through at once, against the same one block at a time."""

from hypothesis import given
from hypothesis import strategies as st

from cache.block_queue import UNKNOWN, Block, BlockQueue

CAPACITY = 12
KEYS = [bytes([65 + number]) for number in range(8)]

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["through", "run", "use", "release", "insert", "first", "drop", "up_to"]), st.integers(0, 7)
    ),
    max_size=60,
)


def through_one_by_one(queue: BlockQueue, count: int) -> None:
    queue.take(count)
    queue.release([queue.fill(UNKNOWN) for _ in range(count)], 0)


class Told:
    """A queue, what it told of evictions, and the requests that run in it."""

    def __init__(self, *, at_once: bool) -> None:
        self.queue = BlockQueue(CAPACITY)
        self.evicted: list[bytes] = []
        self.queue.on_eviction = self.evicted.append
        self.running: list[list[Block]] = []
        self._at_once = at_once

    def do(self, step: Step) -> object:
        kind, number = step
        queue = self.queue
        if kind == "through":
            count = min(number, queue.free)
            (queue.run_through if self._at_once else lambda n: through_one_by_one(queue, n))(count)
        elif kind == "run":
            count = min(number, queue.free)
            queue.take(count)
            self.running.append([queue.fill(key) for key in KEYS[:count]])
            queue.release([], max(0, count - len(KEYS)))
        elif kind == "use":
            hits = queue.hits(KEYS[:number])
            queue.use(hits)
            self.running.append(hits)
        elif kind == "release" and self.running:
            queue.release(self.running.pop(number % len(self.running)), 0)
        elif kind in ("insert", "first"):
            queue.insert(KEYS[number], next_evicted=kind == "first")
        elif kind == "drop":
            return queue.drop(KEYS[number])
        elif kind == "up_to":
            # As the engine's word does: up to the release of a block of known content.
            block = queue.resident.get(KEYS[number])
            return None if block is None or block.references else queue.drop_up_to(block.released)
        return None

    def seen(self) -> tuple[object, ...]:
        queue = self.queue
        return queue.free, queue.evictions, list(queue.resident), self.evicted


@given(STEPS)
def test_a_run_of_unknown_blocks_is_what_its_blocks_were_one_by_one(steps: list[Step]) -> None:
    ours, plain = Told(at_once=True), Told(at_once=False)
    for step in steps:
        assert ours.do(step) == plain.do(step)
        assert ours.seen() == plain.seen()
