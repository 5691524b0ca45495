"""An engine's names of blocks mapped to ours: collisions, unknown parents and salts, bounds."""

import pytest

from cache.blocks import block_hashes, pack_ids
from cache.event_blocks import EventBlocks
from cache.event_sequence import EventSequence
from cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from cache.residency import Residency

BLOCK = 4


class Scene:
    def __init__(self, capacity: int = 100, told_all: bool = False) -> None:
        self.residency = Residency(BLOCK, capacity)
        self.blocks = EventBlocks(self.residency)
        self.residency.told.start([])
        self.residency.told_all = told_all

    def store(self, names: list[int], ids: list[int], parent: int | None = None, salt: str | None = "") -> None:
        self.blocks.apply(0, [BlockStored(tuple(names), parent, pack_ids(ids), BLOCK, salt)])

    def resident(self, ids: list[int], salt: str = "") -> int:
        return self.residency.prefix(salt).extended(ids).resident_tokens


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_short_hash_that_names_two_contents_is_believed_of_neither_once_one_has_left() -> None:
    scene = Scene()
    scene.store([7], ids(0, 4))
    scene.store([7], ids(100, 4))
    assert (scene.resident(ids(0, 4)), scene.resident(ids(100, 4))) == (4, 4)
    assert scene.blocks.counts.collisions == 1
    scene.blocks.apply(0, [BlockRemoved((7,))])
    assert (scene.resident(ids(0, 4)), scene.resident(ids(100, 4))) == (0, 0)
    scene.blocks.apply(0, [BlockRemoved((7,))])
    assert scene.residency.free_blocks == 100


def test_behind_a_short_hash_that_names_two_contents_nothing_is_guessed() -> None:
    scene = Scene()
    scene.store([7], ids(0, 4))
    scene.store([7], ids(100, 4))
    scene.store([8], ids(4, 4), parent=7)
    assert scene.resident(ids(0, 8)) == 4
    assert scene.blocks.counts.unknown_blocks == 1


@pytest.mark.parametrize(("parent", "salt"), [(99, ""), (None, None)], ids=["parent", "salt"])
def test_a_block_whose_parent_or_salt_was_not_told_is_left_out(parent: int | None, salt: str | None) -> None:
    scene = Scene()
    scene.store([1, 2], ids(0, 8), parent, salt)
    assert scene.blocks.held() == []
    assert scene.blocks.counts.unknown_blocks == 2
    scene.blocks.apply(0, [BlockRemoved((1, 2))])


def test_two_copies_of_a_block_are_one_until_both_have_left() -> None:
    scene = Scene()
    scene.store([1], ids(0, 4))
    scene.store([1], ids(0, 4))
    scene.blocks.apply(0, [BlockRemoved((1,))])
    assert scene.resident(ids(0, 4)) == 4
    scene.blocks.apply(0, [BlockRemoved((1,))])
    assert scene.resident(ids(0, 4)) == 0


def test_names_are_bounded_whatever_is_published() -> None:
    scene = Scene(capacity=8)
    for number in range(5000):
        scene.store([number], ids(number * 4, 4))
    assert len(scene.blocks.held()) <= 1024
    assert scene.residency.counts().resident_blocks <= 8


def test_a_block_just_sent_stays_though_the_engine_has_not_told_it_yet() -> None:
    scene = Scene()
    lease = scene.residency.begin(ids(0, 16))
    scene.store([50], ids(500, 4))
    scene.blocks.apply(0, [BlockRemoved((50,))])
    assert scene.resident(ids(0, 16)) == 16
    scene.residency.generated(lease, ())
    scene.residency.end(lease)
    scene.store([1, 2, 3, 4], ids(0, 16))
    assert scene.resident(ids(0, 16)) == 16
    assert scene.residency.counts().resident_blocks == 4


def test_a_removal_does_not_take_a_block_that_a_running_request_holds() -> None:
    scene = Scene()
    scene.store([1, 2], ids(0, 8))
    lease = scene.residency.begin(ids(0, 9))
    scene.blocks.apply(0, [BlockRemoved((2, 1))])
    assert scene.resident(ids(0, 8)) == 8
    scene.residency.generated(lease, ())
    scene.residency.end(lease)


def test_where_the_engine_evicted_another_block_the_two_change_places() -> None:
    scene = Scene(capacity=4)
    for number, start in enumerate((0, 100, 200, 300)):
        scene.store([number], ids(start, 4))
    lease = scene.residency.begin(ids(900, 4))
    assert [scene.resident(ids(start, 4)) for start in (0, 100, 200, 300)] == [0, 4, 4, 4]
    scene.blocks.apply(0, [BlockRemoved((1,))])
    scene.store([9], ids(900, 4))
    assert [scene.resident(ids(start, 4)) for start in (0, 100, 200, 300)] == [4, 0, 4, 4]
    scene.residency.generated(lease, ())
    scene.residency.end(lease)
    assert scene.residency.free_blocks == 4


def test_events_name_what_an_answer_fills_while_it_is_decoded() -> None:
    scene = Scene()
    lease = scene.residency.begin(ids(0, 6), "s")
    scene.store([1], ids(0, 4), salt="s")
    scene.residency.generated(lease, ())
    scene.store([2], ids(4, 4), parent=1)
    scene.store([3], ids(8, 4), parent=2)
    assert scene.resident(ids(0, 20), "s") == 12
    scene.residency.answered(lease, 7)
    scene.residency.end(lease)
    assert scene.residency.counts().resident_blocks == 3
    assert scene.residency.free_blocks == 100
    assert block_hashes(ids(0, 12), BLOCK, "s")[2] in scene.blocks.held()


def test_a_reset_of_the_engine_leaves_what_was_sent_since() -> None:
    scene = Scene()
    scene.store([1], ids(0, 4))
    lease = scene.residency.begin(ids(100, 8))
    scene.blocks.apply(0, [AllBlocksCleared()])
    assert scene.resident(ids(0, 4)) == 0
    assert scene.resident(ids(100, 8)) == 8
    scene.residency.end(lease)


@pytest.mark.parametrize(("told_all", "left"), [(True, 4), (False, 0)])
def test_the_engines_report_drops_nothing_beside_events_that_tell_all(told_all: bool, left: int) -> None:
    scene = Scene(told_all=told_all)
    scene.store([9], ids(500, 4))
    scene.store([1, 2, 3], ids(0, 12))
    lease = scene.residency.begin(ids(0, 13))
    scene.residency.reconcile(lease, 0)
    scene.residency.answered(lease, 1)
    scene.residency.end(lease)
    assert scene.resident(ids(500, 4)) == left


def test_numbers_tell_what_is_next_what_is_missing_and_a_restart() -> None:
    sequence = EventSequence()
    assert sequence.arrived(0) == "next"
    sequence.applied(0)
    assert sequence.arrived(2) == "gap"
    sequence.applied(1)
    sequence.applied(2)
    sequence.applied(3)
    assert sequence.arrived(3) == "known"
    assert sequence.arrived(3) == "restart"
    sequence.begin()
    assert sequence.arrived(0) == "next"


def test_an_answer_that_comes_whole_is_followed_by_its_blocks_while_it_runs() -> None:
    scene = Scene(capacity=6)
    lease = scene.residency.begin(ids(0, 6))
    scene.store([1], ids(0, 4))
    scene.store([2], ids(4, 4), 1)
    # The block that the answer completed is the request's own, not one more.
    assert scene.residency.free_blocks == 4
    scene.residency.reconcile(lease, 0)
    scene.residency.end(lease)
    assert scene.residency.prefix().extended(ids(0, 9)).cached_tokens() == 8


def test_a_request_sent_to_a_busy_engine_takes_its_blocks_when_events_tell_that_it_runs() -> None:
    scene = Scene(capacity=8, told_all=True)
    first = scene.residency.begin(ids(100, 8))
    scene.store([1, 2], ids(100, 8))
    second = scene.residency.begin(ids(0, 9))
    third = scene.residency.begin(ids(0, 17))
    assert scene.residency.free_blocks == 6
    # The planner and whoever is sent next count on what waits.
    assert third.cached_tokens == 8
    assert scene.residency.prefix().extended(ids(0, 17)).cached_tokens() == 16
    scene.store([3, 4], ids(0, 8))
    assert (second.cached_tokens, scene.residency.free_blocks) == (0, 3)
    scene.residency.reconcile(third, 8)
    assert third.cached_tokens == 8
    for lease in (first, second, third):
        scene.residency.end(lease)
    assert scene.residency.free_blocks == 8


def test_what_was_evicted_in_the_step_in_which_a_request_began_was_not_there_for_it() -> None:
    scene = Scene(capacity=8, told_all=True)
    over = scene.residency.begin(ids(0, 9))
    scene.store([1, 2], ids(0, 8))
    scene.residency.generated(over, ())
    scene.residency.end(over)
    running = scene.residency.begin(ids(100, 17))
    scene.residency.generated(running, ())
    late = scene.residency.begin(ids(0, 9))
    assert late.cached_tokens == 8
    removed = BlockRemoved((2,))
    stored = BlockStored((9,), 1, pack_ids(ids(4, 4)), BLOCK, "")
    scene.blocks.apply(0, [removed, stored])
    assert late.cached_tokens == 4
