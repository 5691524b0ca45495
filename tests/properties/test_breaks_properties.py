"""Breaks of made-up prompts against caches that evict, checked by looking through all that was ever sent."""

from dataclasses import dataclass
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.blocks import block_hashes
from prompt_builder.breaks import Story
from prompt_builder.types import Prompt, Segment, SegmentKind
from tests.support.breaking import BLOCK, Fleet

RELAXED = settings(deadline=None, max_examples=150)
KINDS: tuple[SegmentKind, ...] = ("system", "summary", "turn", "chunk", "evidence", "question", "scaffold")

# Few distinct segments of odd lengths, so that prompts share beginnings and blocks hold ends of several segments.
SEGMENTS = st.builds(
    lambda kind, text, tokens: Segment(kind, f"{text}", (text,) * tokens),
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.sampled_from([0, 1, 3, 7, 16, 21, 40]),
)
PROMPTS = st.lists(SEGMENTS, min_size=1, max_size=8).filter(lambda segments: any(s.token_ids for s in segments))
REQUESTS = st.lists(
    st.tuples(PROMPTS, st.sampled_from(["one", "two"]), st.sampled_from(["aa", "bb"])), min_size=1, max_size=12
)


def prompt_of(segments: list[Segment], salt: str) -> Prompt:
    ids = tuple(token for segment in segments for token in segment.token_ids)
    return Prompt(tuple(segments), (), ids, len(ids), block_hashes(ids, BLOCK, salt))


@dataclass
class History:
    """Everything that was sent, told apart by tenant and replica."""

    prompts: list[tuple[Prompt, str, str]]

    def had_tokens(self, ids: tuple[int, ...], salt: str, replica: str) -> bool:
        return any(
            prompt.token_ids is not None and prompt.token_ids[: len(ids)] == ids
            for prompt, sent_to, of in self.prompts
            if (sent_to, of) == (replica, salt)
        )

    def had_end(self, ids: tuple[int, ...], salt: str) -> bool:
        """Whether a segment of the tenant's ended after exactly these."""
        return any(
            prompt.token_ids is not None
            and len(ids) in [0, *accumulate(len(segment.token_ids) for segment in prompt.segments)]
            and prompt.token_ids[: len(ids)] == ids
            for prompt, _, of in self.prompts
            if of == salt
        )


@RELAXED
@given(REQUESTS, st.sampled_from([12, 1000]))
def test_a_break_is_where_and_why_a_search_through_everything_finds_it(
    requests: list[tuple[list[Segment], str, str]], capacity: int
) -> None:
    fleet = Fleet("one", "two", capacity=capacity)
    history = History([])
    for segments, replica, salt in requests:
        prompt = prompt_of(segments, salt)
        if len(prompt.block_hashes) + 1 > capacity:
            continue
        story = Story(tuple(segment.kind for segment in segments))
        found = fleet.ask(prompt, story, replica=replica, salt=salt)
        ids = prompt.token_ids
        assert ids is not None
        other = "two" if replica == "one" else "one"
        at = found.cached_tokens
        block = ids[: at + BLOCK]
        if at + BLOCK > len(ids) - 1:
            assert found.reason == "end"
        elif history.had_tokens(block, salt, replica):
            assert found.reason == "evicted"
        elif history.had_tokens(block, salt, other):
            assert found.reason == "other_replica"
        elif not any(of == salt for _, _, of in history.prompts):
            assert found.reason == "first_request"
        else:
            assert found.reason not in ("end", "evicted", "other_replica", "first_request", "restarted")
            ends = list(accumulate(len(segment.token_ids) for segment in segments))
            first = next(
                place
                for place, end in enumerate(ends)
                if end > at and not (end < at + BLOCK and history.had_end(ids[:end], salt))
            )
            content = next((place for place in range(first, len(ends)) if segments[place].kind != "scaffold"), first)
            assert (found.segment, found.kind) == (content, segments[content].kind)
            start = ends[first - 1] if first else 0
            assert found.token_offset == max(at, start)
        if found.other_tenant:
            end = sum(len(segment.token_ids) for segment in segments[: found.segment + 1])
            assert any(
                earlier.token_ids is not None and earlier.token_ids[:end] == ids[:end]
                for earlier, sent_to, of in history.prompts
                if of != salt and sent_to == replica
            )
        history.prompts.append((prompt, replica, salt))


@RELAXED
@given(REQUESTS)
def test_f5_what_one_tenant_is_told_does_not_depend_on_another(
    requests: list[tuple[list[Segment], str, str]],
) -> None:
    """With room for everybody: what is evicted, and how full an engine is, tenants notice of each other anyway."""
    both, alone = Fleet("one", "two"), Fleet("one", "two")
    for segments, replica, salt in requests:
        prompt, story = prompt_of(segments, salt), Story(tuple(segment.kind for segment in segments))
        seen = both.ask(prompt, story, replica=replica, salt=salt)
        if salt == "aa":
            unseen = alone.ask(prompt, story, replica=replica, salt=salt)
            assert not unseen.other_tenant
            assert (seen.reason, seen.segment, seen.token_offset, seen.cached_tokens) == (
                unseen.reason,
                unseen.segment,
                unseen.token_offset,
                unseen.cached_tokens,
            )
