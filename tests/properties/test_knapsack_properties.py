"""The choice of forms against all choices there are."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from prompt_builder import knapsack
from prompt_builder.knapsack import Form, Knapsack, best_forms
from prompt_builder.types import ChunkForm, PromptChunk
from retrieval.types import RenderedChunk

RELAXED = settings(deadline=None, max_examples=200)

# Few different figures, so that ties are common; eighths, so that sums are exact in any order.
VALUES = st.integers(0, 8).map(lambda eighths: eighths / 8)


def form(place: int, tokens: int, value: float, kind: ChunkForm) -> Form:
    label = f"k{place}"
    rendered = RenderedChunk(label, "", ())
    whole = PromptChunk(label, "f", "n", "", value, "", rendered)
    return Form(whole, tokens, value, None if kind == "whole" else lambda: rendered)


@st.composite
def chunks(draw: st.DrawFn, most_chunks: int = 5, most_tokens: int = 12) -> list[tuple[Form, ...]]:
    made = []
    for place in range(draw(st.integers(0, most_chunks))):
        extracts = draw(st.lists(st.tuples(st.integers(0, most_tokens), VALUES), max_size=3))
        whole = draw(st.tuples(st.integers(0, most_tokens), VALUES))
        made.append((*(form(place, *of, "extract") for of in extracts), form(place, *whole, "whole")))
    return made


def tokens_of(choice: knapsack.Choice) -> int:
    return sum(taken.tokens for taken in choice if taken is not None)


def value_of(choice: knapsack.Choice) -> float:
    return sum(taken.value for taken in choice if taken is not None)


def count_of(choice: knapsack.Choice) -> int:
    return sum(taken is not None for taken in choice)


def best_by_trying_all(forms: list[tuple[Form, ...]], room: int, most: int) -> tuple[float, int]:
    """The greatest value, and the fewest tokens that give it."""
    possible = (
        choice
        for choice in product(*((None, *chunk) for chunk in forms))
        if tokens_of(choice) <= room and count_of(choice) <= most
    )
    value, tokens = min(((-value_of(choice), tokens_of(choice)) for choice in possible), default=(0.0, 0))
    return -value, tokens


def best_whole_run(forms: list[tuple[Form, ...]], room: int, most: int) -> float:
    best = value = 0.0
    for chunk in forms[:most]:
        room -= chunk[-1].tokens
        if room < 0:
            break
        value += chunk[-1].value
        best = max(best, value)
    return best


@RELAXED
@given(chunks(), st.integers(0, 40), st.integers(0, 6))
def test_no_choice_there_is_has_more_value(forms: list[tuple[Form, ...]], room: int, most: int) -> None:
    choice = best_forms(forms, room, most)
    assert len(choice) == len(forms)
    assert all(taken is None or taken in chunk for taken, chunk in zip(choice, forms, strict=True))
    assert tokens_of(choice) <= room
    assert count_of(choice) <= most
    value, tokens = best_by_trying_all(forms, room, most)
    assert value_of(choice) == value
    # Zero forms are never worth taking, so that nothing is sent in vain.
    assert all(taken is None or taken.value > 0 for taken in choice)
    if most >= len(forms):
        assert tokens_of(choice) == tokens


@RELAXED
@given(chunks(), st.integers(0, 6))
def test_one_table_serves_every_smaller_room(forms: list[tuple[Form, ...]], most: int) -> None:
    table = Knapsack(forms, 40, most)
    before = 0.0
    for room in range(41):
        value, _ = best_by_trying_all(forms, room, most)
        assert table.value(room) == value_of(table.choice(room)) == value
        assert tokens_of(table.choice(room)) <= room
        assert value >= before
        before = value
    assert table.value(-1) == 0.0


@RELAXED
@given(chunks(most_chunks=7, most_tokens=300), st.integers(0, 2000), st.integers(1, 6), st.integers(1, 2000))
def test_a_table_too_large_to_count_every_token_still_keeps_its_word(
    forms: list[tuple[Form, ...]], room: int, most: int, cells: int
) -> None:
    exact, coarse = Knapsack(forms, room, most), Knapsack(forms, room, most, most_cells=cells)
    choice = coarse.choice(room)
    assert tokens_of(choice) <= room
    assert count_of(choice) <= most
    assert value_of(choice) >= best_whole_run(forms, room, most)
    assert exact.value(room) >= value_of(choice)
    assert value_of(choice) >= exact.value(room - (most + 1) * (coarse.step_tokens - 1))


@RELAXED
@given(chunks(), st.integers(0, 40), st.integers(0, 6))
def test_the_choice_is_never_worse_than_the_best_run_of_whole_chunks(
    forms: list[tuple[Form, ...]], room: int, most: int
) -> None:
    assert value_of(best_forms(forms, room, most)) >= best_whole_run(forms, room, most)


def test_of_equal_chunks_the_better_rank_is_taken() -> None:
    forms = [(form(place, 10, 0.5, "whole"),) for place in range(4)]
    assert [taken is not None for taken in best_forms(forms, 20, 4)] == [True, True, False, False]
    assert [taken is not None for taken in best_forms(forms, 40, 2)] == [True, True, False, False]


def test_a_free_chunk_is_taken_without_room() -> None:
    forms = [(form(0, 0, 0.5, "whole"),), (form(1, 1, 0.9, "whole"),)]
    assert best_forms(forms, 0, 2) == (forms[0][0], None)
