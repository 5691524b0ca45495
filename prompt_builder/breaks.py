"""Where a prompt left what the engine held, and why: the first segment that could not be reused."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Literal, Protocol, get_args

from cache.blocks import HASH_BYTES, are_block_hashes, child_hash, pack_ids, root_hash
from cache.sent import Place, Seen
from prompt_builder.layout import user_pieces
from prompt_builder.types import Plan, Prompt, SegmentKind, Transcript

BreakReason = Literal[
    "end",
    "new_question",
    "new_chunk",
    "new_turn",
    "new_history",
    "new_system_text",
    "volatile_system_text",
    "edited_turn",
    "stripped_turn",
    "cut_history",
    "fold",
    "evicted",
    "restarted",
    "other_replica",
    "first_request",
    "unknown",
]

FRONT_SEGMENTS = 8
"""Ends of the first segments are recorded with every prompt: the front is shared, and must not be forgotten."""

_KINDS: tuple[SegmentKind, ...] = get_args(SegmentKind)
_BIT = {kind: 1 << place for place, kind in enumerate(_KINDS)}
_END = 1 << len(_KINDS)
_CONTEXT = _BIT["chunk"] | _BIT["reference"] | _BIT["evidence"] | _BIT["facts"]
_TAIL = ("reference", "evidence", "facts", "question")


class Memory(Protocol):
    """What had been sent before, as `cache.sent.SentView` tells it."""

    def block(self, key: bytes) -> Seen | None: ...

    def elsewhere(self, key: bytes) -> bool: ...

    def own(self, key: bytes) -> bool: ...

    def place(self, key: bytes) -> Place | None: ...

    def place_meanwhile(self, key: bytes) -> bool: ...

    def foreign(self, content: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class Story:
    """What is known of a prompt's segments beside their ids.

    `kinds` has one entry a segment. `known` and `stripped` are places of `turn` segments: of messages that the
    gateway recognised, and of those that are rendered without the chunks that they were sent with. `cut`: turns were
    left out to fit the window. `volatile_system`: the system text is known to change from request to request.
    """

    kinds: tuple[SegmentKind, ...]
    known: frozenset[int] = frozenset()
    stripped: frozenset[int] = frozenset()
    cut: bool = False
    volatile_system: bool = False


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """`segment` is a place in the prompt's segments, `token_offset` the first token that differs or was lost.

    `reason` is told without regard to other tenants. `other_tenant`: another one sent the same up to the end of the
    segment, so that only the salt keeps them apart. No tenant may learn that: it is for the operator.
    """

    cached_tokens: int
    segment: int
    kind: SegmentKind
    label: str | None
    token_offset: int
    reason: BreakReason
    other_tenant: bool = False


def plan_story(plan: Plan, transcript: Transcript, prompt: Prompt, *, volatile_system: bool = False) -> Story:
    """The story of a planned prompt."""
    kinds = tuple(segment.kind for segment in prompt.segments)
    turns = [place for place, kind in enumerate(kinds) if kind == "turn"]
    known: set[int] = set()
    stripped: set[int] = set()
    first = max(0, len(transcript.past) - len(plan.past))
    at = 0
    for number, (message, original) in enumerate(zip(plan.past, transcript.past[first:], strict=False)):
        is_stripped = number < plan.stripped or plan.rendering == "stripped"
        context = None if is_stripped else message.context
        count = 1 if context is None else len(user_pieces(context, message.content))
        own = turns[at : at + count]
        at += count
        if first + number < transcript.known:
            known.update(own)
        # The plan's own message may have lost its context already.
        if context is None and original.context is not None:
            stripped.update(own)
    if at != len(turns):
        known, stripped = set(), set()
    cut = any(dropped.what == "turn" for dropped in plan.dropped)
    return Story(kinds, frozenset(known), frozenset(stripped), cut, volatile_system)


def plain_story(prompt: Prompt, *, volatile_system: bool = False) -> Story:
    """The story of messages that pass through: the last one is the question, those of the system are its text."""
    kinds = [segment.kind for segment in prompt.segments]
    turns = [place for place, kind in enumerate(kinds) if kind == "turn"]
    if len(turns) == len(prompt.messages) and all(kind in ("turn", "scaffold") for kind in kinds):
        for place, message in zip(turns, prompt.messages, strict=True):
            if message.role in ("system", "developer"):
                kinds[place] = "system"
        if prompt.messages and prompt.messages[-1].role == "user":
            kinds[turns[-1]] = "question"
    return Story(tuple(kinds), volatile_system=volatile_system)


def find_break(
    prompt: Prompt, story: Story, cached_tokens: int, block_size: int, salt: str, memory: Memory | None
) -> PrefixBreak | None:
    """Where and why reuse ended after `cached_tokens`, of whole blocks of `block_size` tokens.

    `memory` is None where what the replica was sent says nothing of what it held. None for a prompt whose ids are not
    known, or were not hashed in this block size. Looks at the block of the break and at the segments that end in it,
    whatever the length of the prompt.
    """
    ids, hashes = prompt.token_ids, prompt.block_hashes
    if not ids or block_size <= 0 or not 0 <= cached_tokens <= len(ids):
        return None
    if not are_block_hashes(hashes, ids, block_size, salt):
        return None
    ends = _ends(prompt)
    block = cached_tokens // block_size
    at = block * block_size
    place = bisect_right(ends, at)
    if block >= (len(ids) - 1) // block_size:
        return _told(prompt, story, cached_tokens, min(place, len(ends) - 1), at, "end")
    seen = None if memory is None else memory.block(hashes[block])
    if memory is None or seen == "meanwhile":
        return _told(prompt, story, cached_tokens, place, at, "unknown")
    if seen is not None:
        return _told(prompt, story, cached_tokens, place, at, "evicted" if seen == "held" else "restarted")
    if memory.elsewhere(hashes[block]):
        return _told(prompt, story, cached_tokens, place, at, "other_replica")
    keys = _Keys(prompt, ends, block_size, salt)
    # The blocks differ. Segments that end in it and were sent like this, to whatever replica, do not.
    while place + 1 < len(ends) and ends[place] < at + block_size and memory.place(keys.at(place + 1)) is not None:
        place += 1
    content = next((each for each in range(place, len(ends)) if story.kinds[each] != "scaffold"), place)
    # Of what others sent, or the engine generated, only blocks are known: it may have gone on as this prompt does.
    own = not block or memory.own(hashes[block - 1])
    reason = _reason(story, memory, keys, place, content, within_foreign=not own and keys.start(place) < at)
    before = memory.place(keys.at(content))
    first, digest = (0, b"") if before is None else (content, before.content)
    other_tenant = memory.foreign(keys.contents(first, content + 1, digest)[content + 1])
    offset = max(at, keys.start(place))
    return _told(prompt, story, cached_tokens, content, offset, reason, other_tenant=other_tenant)


def places_to_record(
    prompt: Prompt, story: Story, cached_tokens: int, block_size: int, salt: str, memory: Memory
) -> list[Place]:
    """The ends of segments that a prompt may be the first to have: those behind what was cached, and its front."""
    ids = prompt.token_ids
    if not ids or block_size <= 0 or not are_block_hashes(prompt.block_hashes, ids, block_size, salt):
        return []
    ends = _ends(prompt)
    count = len(ends)
    keys = _Keys(prompt, ends, block_size, salt)
    behind = bisect_right(ends, min(cached_tokens, len(ids)) // block_size * block_size)
    followers = [*(_BIT[kind] for kind in story.kinds), 0]
    # Behind the last message nothing or only the opening of the answer follows.
    last = max((place for place, kind in enumerate(story.kinds) if kind != "scaffold"), default=-1)
    for place in (last + 1, count):
        followers[place] |= _END
    front = {place: memory.place(keys.at(place)) for place in (*range(min(FRONT_SEGMENTS, behind)), behind)}
    known = {place: found.content for place, found in front.items() if found is not None}
    first = behind if len(known) == len(front) else 0
    contents = known | keys.contents(first, count, known.get(first, b""))
    wanted = [*front, *range(behind + 1, count + 1)]
    return [Place(keys.at(place), followers[place], contents[place]) for place in wanted]


def _told(
    prompt: Prompt,
    story: Story,
    cached_tokens: int,
    segment: int,
    offset: int,
    reason: BreakReason,
    *,
    other_tenant: bool = False,
) -> PrefixBreak:
    label = prompt.segments[segment].label
    return PrefixBreak(cached_tokens, segment, story.kinds[segment], label, offset, reason, other_tenant)


def _reason(
    story: Story, memory: Memory, keys: "_Keys", place: int, content: int, *, within_foreign: bool
) -> BreakReason:
    """Why segment `place`, or the one of a message that its scaffolding opens, was not sent before.

    `within_foreign`: the replica held more of it than this gateway sent.
    """
    kind, before = story.kinds[content], memory.place(keys.at(place))
    if within_foreign and not (kind == "turn" and before is not None and before.followers & _END):
        return "unknown"
    if memory.place_meanwhile(keys.at(place + 1)):
        return "unknown"
    if memory.place(keys.at(0)) is None:
        return "first_request"
    if kind == "system":
        return "volatile_system_text" if story.volatile_system else "new_system_text"
    if kind == "summary":
        return "fold"
    if kind == "chunk":
        return "new_chunk"
    if kind in _TAIL:
        return "new_question"
    return _turn_reason(story, before, content) if kind == "turn" else "unknown"


def _turn_reason(story: Story, before: Place | None, turn: int) -> BreakReason:
    followers = before.followers if before is not None else 0
    known = turn in story.known
    if turn in story.stripped and followers & _CONTEXT:
        return "stripped_turn"
    if followers & _END and (known or not followers & _BIT["turn"]):
        return "new_turn"
    if "turn" not in story.kinds[:turn]:
        return "cut_history" if story.cut else "unknown" if known else "new_history"
    return "edited_turn" if followers and not known else "unknown"


def _ends(prompt: Prompt) -> list[int]:
    return list(accumulate(len(segment.token_ids) for segment in prompt.segments))


class _Keys:
    """Names of the places between a prompt's segments; place 0 is before the first."""

    def __init__(self, prompt: Prompt, ends: Sequence[int], block_size: int, salt: str) -> None:
        self._prompt = prompt
        self._ids: Sequence[int] = prompt.token_ids or ()
        self._ends = ends
        self._size = block_size
        self._salt = salt

    def start(self, segment: int) -> int:
        return self._ends[segment - 1] if segment else 0

    def at(self, place: int) -> bytes:
        """The hash of everything before the place: of its whole blocks, then of the ids behind them."""
        token = self.start(place)
        block = token // self._size
        parent = self._prompt.block_hashes[block - 1] if block else root_hash(self._size, self._salt)
        return child_hash(parent, pack_ids(self._ids[block * self._size : token]))

    def contents(self, first: int, last: int, digest: bytes) -> dict[int, bytes]:
        """The same without the salt for the places from `first`, which has this one, to `last`."""
        found = {first: digest}
        for place, segment in enumerate(self._prompt.segments[first:last], start=first + 1):
            found[place] = digest = blake2b(digest + pack_ids(segment.token_ids), digest_size=HASH_BYTES).digest()
        return found
