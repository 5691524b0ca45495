"""What the counts behind our order hold under traffic that never ends."""

import tracemalloc
from collections.abc import Iterator

import numpy as np

from bench.report import Report
from prompt_builder.companions import Companions

CHUNKS = 1_000_000
CHUNKS_A_REQUEST = 6
TENANTS = 50
EXPONENT = 1.1
POINTS = 8
SEED = 3
MOST_GROWTH = 1.1


def memory_curve(report: Report, requests: int) -> None:
    """Chunks by Zipf's law over 1,000,000, tenants drawn evenly; memory as the allocator sees it.

    It must have stopped growing: the second half may hold no more than a tenth above what the first half came to.
    """
    companions = Companions()
    marks = {requests * point // POINTS for point in range(1, POINTS + 1)}
    rows: list[tuple[int, float, int]] = []
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for count, (key, labels) in enumerate(_traffic(requests), start=1):
        companions.observe(key, [(label, 200) for label in labels])
        if count in marks:
            now, _ = tracemalloc.get_traced_memory()
            rows.append((count, (now - before) / 1e6, companions.entries))
    tracemalloc.stop()
    report.table("Memory of the counts, Zipf traffic", ("requests", "MB", "entries"), rows)
    half = len(rows) // 2
    report.at_most("memory, second half / first", max(row[1] for row in rows[half:]) / rows[half - 1][1], MOST_GROWTH)


def _traffic(requests: int) -> Iterator[tuple[bytes, tuple[str, ...]]]:
    rng = np.random.default_rng(SEED)
    batch = 10_000
    while requests > 0:
        drawn = rng.zipf(EXPONENT, (batch, CHUNKS_A_REQUEST)) % CHUNKS
        tenants = rng.integers(TENANTS, size=batch)
        for tenant, chunks in zip(tenants[:requests].tolist(), drawn[:requests].tolist(), strict=True):
            # Labels of the prompt are strings of their own, as they come from the store.
            yield b"tenant %d" % tenant, tuple(f"k{chunk:x}" for chunk in dict.fromkeys(chunks))
        requests -= batch
