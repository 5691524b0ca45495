"""The replay behind `bench.ragpulse`, on requests of which the reuse can be counted by hand."""

from bench.ragpulse import UNLIMITED, replay
from bench.ragpulse_orders import Ours, Retrieved, SentTree, baselines
from bench.ragpulse_trace import Logged, Trace

SIZES = {0: 64, 1: 32, 2: 16, 3: 16, 10: 160, 11: 160, 12: 160, 20: 8}


def asked(*passages: int, volatile: int = 2) -> Logged:
    return Logged((0, 1, volatile), passages, (20,))


REQUESTS = [asked(10, 11), asked(11, 10, volatile=3), asked(11, 10)]


def test_cached_tokens_are_those_of_shared_whole_blocks() -> None:
    trace = Trace(REQUESTS, SIZES)
    logged = replay(trace, REQUESTS, None, UNLIMITED)
    assert logged.prompt.tolist() == [96 + 16 + 320 + 8] * 3
    # The front; the third prompt shares its volatile part with the first one, and then comes another passage.
    assert logged.cached.tolist() == [0, 96, 112]
    assert replay(trace, REQUESTS, Retrieved(), UNLIMITED).cached.tolist() == [0, 96, 96 + 320]
    assert replay(trace, REQUESTS, Ours(trace), UNLIMITED).cached.tolist() == [0, 96 + 320, 96 + 320 + 16]


def test_every_order_sends_the_same_passages_and_repeated_ones_again() -> None:
    requests = [asked(10, 11, 10, 12), asked(12, 11), asked()]
    trace = Trace(requests, SIZES)
    orders = [None, *baselines(trace).values(), Ours(trace), Ours(trace, pin_last=1)]
    prompts = {tuple(replay(trace, requests, order, UNLIMITED).prompt.tolist()) for order in orders}
    assert len(prompts) == 1


def test_a_small_cache_forgets_and_the_tree_of_what_was_sent_does_not() -> None:
    trace = Trace(REQUESTS, SIZES)
    tree = SentTree(trace)
    assert (
        replay(trace, REQUESTS, tree, 160).cached.sum() < replay(trace, REQUESTS, Retrieved(), UNLIMITED).cached.sum()
    )
    assert tree.nodes == 2
