"""Hashes that are made as far as they are asked for."""

from cache.blocks import block_hashes
from cache.hash_memo import RUN_BLOCKS, HashMemo
from cache.prompt_tree import PromptTree
from cache.residency import Residency

SIZE = 4
PROMPT = tuple(range(20 * RUN_BLOCKS * SIZE + 1))


def test_a_long_prompt_that_no_replica_holds_is_hashed_when_it_is_sent_and_not_before() -> None:
    memo, residency = HashMemo(), Residency(SIZE, 2000)
    hashes = memo.late_hashes(PROMPT, SIZE, "s")
    tree = PromptTree(SIZE, "s", memo)
    tree.hashed(PROMPT, hashes)
    assert residency.prefix("s", tree).extended(PROMPT).resident_tokens == 0
    assert len(memo) == 1
    residency.generated(residency.begin(PROMPT, "s", hashes), ())
    assert len(memo) == 20
    assert residency.prefix("s").extended(PROMPT).resident_tokens == len(PROMPT) - 1


def test_a_prompt_that_is_held_in_part_is_hashed_no_further_than_twice_as_far() -> None:
    memo, residency = HashMemo(), Residency(SIZE, 2000)
    held = PROMPT[: 3 * RUN_BLOCKS * SIZE + SIZE]
    residency.generated(residency.begin(held, "s"), ())
    tree = PromptTree(SIZE, "s")
    tree.hashed(PROMPT, memo.late_hashes(PROMPT, SIZE, "s"))
    assert residency.prefix("s", tree).extended(PROMPT).resident_tokens == len(held)
    assert len(memo) == 4


def test_late_hashes_are_a_sequence_of_those_of_the_blocks() -> None:
    hashes, wanted = HashMemo().late_hashes(PROMPT, SIZE, "s"), block_hashes(PROMPT, SIZE, "s")
    assert len(hashes) == len(wanted)
    assert hashes[40] == wanted[40]
    assert list(hashes[10:70:7]) == list(wanted[10:70:7])
    assert hashes[-1] == wanted[-1]
    assert hashes == wanted
    assert hash(hashes) == hash(wanted)
