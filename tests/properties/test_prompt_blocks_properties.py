import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.blocks import HASH_BYTES, block_hashes

# How long one example takes says more about the machine's load than about the code.
RELAXED = settings(deadline=None)

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
BLOCK_SIZES = st.integers(1, 40)


@RELAXED
@given(TOKEN_IDS, BLOCK_SIZES)
def test_only_whole_blocks_are_hashed(token_ids: list[int], block_size: int) -> None:
    hashes = block_hashes(token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert all(len(block) == HASH_BYTES for block in hashes)
    assert hashes == block_hashes(token_ids[: len(hashes) * block_size], block_size)


@RELAXED
@given(TOKEN_IDS, TOKEN_IDS, TOKEN_IDS, BLOCK_SIZES)
def test_prompts_share_hashes_exactly_as_far_as_they_share_blocks(
    common: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    first, second = common + left, common + right
    equal = 0
    while equal < min(len(first), len(second)) and first[equal] == second[equal]:
        equal += 1
    pairs = zip(block_hashes(first, block_size), block_hashes(second, block_size), strict=False)
    assert [a == b for a, b in pairs] == [
        (place + 1) * block_size <= equal for place in range(min(len(first), len(second)) // block_size)
    ]


@RELAXED
@given(st.lists(st.integers(0, 50_000), min_size=40, max_size=80), st.text(max_size=5), st.text(max_size=5))
def test_f5_prompts_under_two_salts_share_no_block(token_ids: list[int], one: str, other: str) -> None:
    shared = set(block_hashes(token_ids, 16, one)) & set(block_hashes(token_ids, 16, other))
    assert bool(shared) == (one == other)


def test_block_sizes_do_not_mix() -> None:
    assert not set(block_hashes([7] * 64, 16)) & set(block_hashes([7] * 64, 32))


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_at_least_one_token(block_size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        block_hashes([1], block_size)
