"""Blocks that are hashed once: for all replicas of a request, and for all requests that begin alike."""

import gc
import random
from collections.abc import Container, Iterator, Sequence

import pytest

from cache.blocks import block_hashes
from cache.hash_memo import RUN_BLOCKS, HashMemo
from cache.prompt_tree import PromptTree, Stretch
from cache.residency import Residency, resident_path

SIZE = 4


def ids(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


class Asked(Container[bytes]):
    """Holds some blocks and remembers which it was asked for."""

    def __init__(self, held: Sequence[bytes]) -> None:
        self.held = frozenset(held)
        self.asked: list[bytes] = []

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        self.asked.append(key)
        return key in self.held


def run(residency: Residency, token_ids: Sequence[int], salt: str = "") -> None:
    lease = residency.begin(token_ids, salt)
    residency.generated(lease, ())
    residency.end(lease)


def stretch_of(tree: PromptTree, *pieces: tuple[int, ...]) -> Stretch:
    stretch = tree.start
    for piece in pieces:
        stretch = tree.behind(stretch, piece)
    return stretch


def test_a_stretch_is_found_again_by_its_ids_and_only_where_they_cannot_change() -> None:
    tree = PromptTree(SIZE)
    piece, changeable = ids(0, 9), list(ids(0, 9))
    assert tree.behind(tree.start, piece) is tree.behind(tree.start, piece)
    assert tree.behind(tree.start, piece) is not tree.behind(tree.start, ids(0, 9))
    assert tree.behind(tree.start, changeable) is not tree.behind(tree.start, changeable)


def test_a_tree_and_its_stretches_go_without_the_garbage_collector() -> None:
    residency = Residency(SIZE, 100)
    gc.collect()
    resident_path(residency.prefix("s").extended(ids(0, 40)), [ids(40, 9), ids(50, 3)])
    assert gc.collect() == 0


def test_blocks_are_looked_up_to_the_first_that_is_not_resident() -> None:
    prompt = ids(0, 5 * SIZE + 1)
    hashes = block_hashes(prompt, SIZE)
    holding = Asked([hashes[0], hashes[1], hashes[3]])
    assert stretch_of(PromptTree(SIZE), prompt).resident_blocks(holding) == 2
    assert holding.asked == list(hashes[:3])


def test_a_second_replica_that_holds_less_or_more_sees_the_same_blocks() -> None:
    prompt = ids(0, 6 * SIZE)
    hashes = block_hashes(prompt, SIZE, "tenant")
    stretch = stretch_of(PromptTree(SIZE, "tenant"), prompt[:7], prompt[7:])
    first = stretch_of(PromptTree(SIZE, "tenant"), prompt[:7])
    assert first.resident_blocks(set(hashes)) == 1
    for held in (3, 1, 6, 2):
        assert stretch.resident_blocks(set(hashes[:held])) == max(0, held - 1)


@pytest.mark.parametrize("memo", [False, True])
def test_prefixes_in_one_tree_say_what_prefixes_on_their_own_say(memo: bool) -> None:
    draw = random.Random(5)
    pieces = [tuple(draw.randrange(9) for _ in range(draw.choice((0, 1, 3, 60, 200)))) for _ in range(12)]
    replicas = [Residency(SIZE, 2000) for _ in range(4)]
    known = HashMemo()
    for residency in replicas:
        for _ in range(3):
            draw.shuffle(pieces)
            prompt = [i for piece in pieces for i in piece]
            run(residency, prompt, "s")
            known.block_hashes(prompt, SIZE, "s")
    for _ in range(20):
        draw.shuffle(pieces)
        tree = PromptTree(SIZE, "s", known if memo else None)
        for residency in replicas:
            shared, alone = residency.prefix("s", tree), residency.prefix("s")
            for piece in pieces[: draw.randrange(12)]:
                shared, alone = shared.extended(piece), alone.extended(piece)
                assert shared == alone
            assert resident_path(shared, pieces) == resident_path(alone, pieces)


def test_a_tree_of_another_tenant_or_block_size_is_not_used() -> None:
    residency = Residency(SIZE, 100)
    run(residency, ids(0, 40), "a")
    for tree in (PromptTree(SIZE, "b"), PromptTree(8, "a")):
        assert residency.prefix("a", tree).extended(ids(0, 40)).resident_tokens == 40


def lengths() -> Iterator[int]:
    run_tokens = RUN_BLOCKS * SIZE
    for runs in (0, 1, 2):
        for more in (-1, 0, 1, SIZE):
            yield max(0, runs * run_tokens + more)


@pytest.mark.parametrize("length", lengths())
def test_remembered_hashes_are_those_of_the_blocks(length: int) -> None:
    memo = HashMemo()
    prompt = ids(0, length)
    for _ in range(2):
        assert memo.block_hashes(prompt, SIZE, "s") == block_hashes(prompt, SIZE, "s")
    changed = (*prompt[:-1], 7) if prompt else prompt
    assert memo.block_hashes(changed, SIZE, "s") == block_hashes(changed, SIZE, "s")
    assert memo.block_hashes(prompt, SIZE, "t") == block_hashes(prompt, SIZE, "t")


def test_the_memo_keeps_no_more_runs_than_it_may_and_the_last_used_stay() -> None:
    memo = HashMemo(most_runs=2)
    prompts = [ids(1000 * start, RUN_BLOCKS * SIZE) for start in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        memo.block_hashes(prompt, SIZE)
    assert len(memo) == 2
    stretch = stretch_of(PromptTree(SIZE, "", memo), prompts[0])
    hashed = block_hashes(prompts[0], SIZE)
    assert stretch.resident_blocks(set(hashed)) == RUN_BLOCKS


def test_a_prompt_whose_hashes_are_known_is_followed_without_hashing_it() -> None:
    residency = Residency(SIZE, 100)
    prompt = ids(0, 42)
    run(residency, prompt, "s")
    tree = PromptTree(SIZE, "s")
    # Ids that cannot be packed show that nobody does, but for the first block, which tells whose hashes these are.
    unreadable = (*prompt[:SIZE], *(-1 for _ in prompt[SIZE:]))
    tree.hashed(unreadable, block_hashes(prompt, SIZE, "s"))
    assert residency.prefix("s", tree).extended(unreadable).resident_tokens == 40


@pytest.mark.parametrize("other", [8, 5, 3])
def test_hashes_of_another_block_size_are_not_taken(other: int) -> None:
    """Of 42 tokens ten blocks are of 4, of 15 tokens three of 5 as three of 4."""
    for length in (42, 15):
        residency = Residency(SIZE, 100)
        prompt = ids(0, length)
        run(residency, prompt, "s")
        tree = PromptTree(SIZE, "s")
        tree.hashed(prompt, block_hashes(prompt, other, "s"))
        assert residency.prefix("s", tree).extended(prompt).resident_tokens == length // SIZE * SIZE


def test_replicas_of_two_block_sizes_are_followed_for_one_request_though_their_blocks_are_equally_many() -> None:
    """A prompt of 80 tokens, rendered for blocks of 64; the other replica has blocks of 48."""
    prompt, memo = ids(0, 80), HashMemo()
    for rendered_for, other_size in ((64, 48), (48, 64)):
        same, other = Residency(rendered_for, 100), Residency(other_size, 100)
        hashes = memo.block_hashes(prompt, rendered_for, "s")
        for residency in (same, other):
            lease = residency.begin(prompt, "s", hashes)
            residency.generated(lease, ())
            residency.end(lease)
        tree = PromptTree(rendered_for, "s", memo)
        tree.hashed(prompt, hashes)
        found = {each.block_size: each.prefix("s", tree).extended(prompt) for each in (same, other)}
        assert {size: each.resident_tokens for size, each in found.items()} == {48: 48, 64: 64}
        # A request without hashes at hand meets the same blocks.
        assert [each.begin(prompt, "s").cached_tokens for each in (same, other)] == [rendered_for, other_size]
        misled = PromptTree(other_size, "s", memo)
        misled.hashed(prompt, hashes)
        assert other.prefix("s", misled).extended(prompt).resident_tokens == other_size
