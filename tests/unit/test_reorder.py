"""A prompt that has waited: its chunks take the places that the replica serves best now, and nothing else changes."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.residency import Residency
from prompt_builder.outlook import Outlook
from prompt_builder.types import Limits, Plan, Transcript
from tests.support.ferries import BUILDER, PLANNER, SPEED, found, names

LIMITS = Limits(None, None, 16, 8)


def outlook(residency: Residency) -> Outlook:
    return Outlook("engine", SPEED, lambda seconds: 0.0, residency.prefix())


def planned(names: str, residency: Residency, limits: Limits = LIMITS) -> Plan:
    return PLANNER.plan(Transcript("", (), "When?"), found(names), limits, (outlook(residency),))


def sent(residency: Residency, plan: Plan) -> None:
    ids = BUILDER.render(plan).token_ids
    assert ids is not None
    lease = residency.begin(ids)
    residency.generated(lease, [0])
    residency.end(lease)


def test_what_others_have_left_meanwhile_comes_first() -> None:
    residency = Residency(16, 10_000)
    waiting = planned("abc", residency)
    sent(residency, planned("bxya", residency))
    held = names(planned("bxya", residency))
    now = PLANNER.reordered(waiting, BUILDER.render(waiting), LIMITS, outlook(residency))
    assert names(now)[0] == held[0] or held[0] not in "abc"
    sent(residency, planned("cb", residency))
    later = PLANNER.reordered(waiting, BUILDER.render(waiting), LIMITS, outlook(residency))
    assert names(later)[:2] == names(planned("cb", residency))


def test_a_plan_for_which_nothing_has_changed_is_itself() -> None:
    residency = Residency(16, 10_000)
    waiting = planned("abc", residency)
    assert PLANNER.reordered(waiting, BUILDER.render(waiting), LIMITS, outlook(residency)) is waiting


def test_an_order_that_the_request_asked_for_stays() -> None:
    residency = Residency(16, 10_000)
    limits = replace(LIMITS, chunk_order="relevance_first")
    waiting = planned("abc", residency, limits)
    sent(residency, planned("cb", residency))
    assert PLANNER.reordered(waiting, BUILDER.render(waiting), limits, outlook(residency)) is waiting


def test_what_would_be_found_now_is_what_the_new_order_finds() -> None:
    residency = Residency(16, 10_000)
    waiting = planned("abc", residency)
    prompt = BUILDER.render(waiting)

    def found_now(limits: Limits = LIMITS) -> int | None:
        return PLANNER.cached_tokens(waiting, prompt, limits, residency.prefix())

    assert found_now() == 0
    sent(residency, planned("cb", residency))
    ordered = BUILDER.render(PLANNER.reordered(waiting, prompt, LIMITS, outlook(residency)))
    assert found_now() == residency.prefix().extended(ordered.token_ids or ()).cached_tokens() > 0
    as_it_is = residency.prefix().extended(prompt.token_ids or ()).cached_tokens()
    assert found_now(replace(LIMITS, chunk_order="relevance_first")) == as_it_is
    assert PLANNER.cached_tokens(waiting, BUILDER.render(waiting, exact=False), LIMITS, residency.prefix()) is None


def test_a_prompt_that_the_engine_templates_stays_as_it_is() -> None:
    residency = Residency(16, 10_000)
    waiting = planned("abc", residency)
    sent(residency, planned("cb", residency))
    inexact = BUILDER.render(waiting, exact=False, reason="tools")
    assert PLANNER.reordered(waiting, inexact, LIMITS, outlook(residency)) is waiting


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.permutations("abcdef"), min_size=1, max_size=4),
    st.permutations("abcdef"),
    st.integers(1, 6),
    st.integers(0, 2),
)
def test_chunks_change_places_and_nothing_else_changes(
    before: list[list[str]], asked: list[str], count: int, pin_last: int
) -> None:
    residency = Residency(16, 10_000)
    limits = replace(LIMITS, pin_last=pin_last)
    waiting = planned("".join(asked[:count]), residency, limits)
    for other in before:
        sent(residency, planned("".join(other[:4]), residency))
    now = PLANNER.reordered(waiting, BUILDER.render(waiting), limits, outlook(residency))
    assert sorted(names(now)) == sorted(names(waiting))
    assert replace(now, chunks=()) == replace(waiting, chunks=())
    pinned = [chunk.filename[0] for chunk in now.chunks[len(now.chunks) - pin_last :]]
    assert pinned == asked[:count][:pin_last][::-1]
    first = outlook(residency).prefix.extended(BUILDER.render(now).token_ids or ()).cached_tokens()
    assert first >= outlook(residency).prefix.extended(BUILDER.render(waiting).token_ids or ()).cached_tokens()
