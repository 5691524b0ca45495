"""A conversation measured for planning: every text tokenized once, every rendering of the past a sum."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from threading import Lock

from prompt_builder.choice import flat, standing_texts, turns
from prompt_builder.labels import REFERENCES_MARK
from prompt_builder.layout import (
    UNKNOWN_SCAFFOLD_TOKENS,
    Block,
    Piece,
    blocks_of,
    for_template,
    past_block,
    repaired_references,
    scaffolding,
    user_pieces,
)
from prompt_builder.template import ChatTemplate
from prompt_builder.types import PastMessage, Plan, Rendering, Role, Tokenizer, Transcript, TurnContext

MOST_FRAMES = 256
MOST_MESSAGES = 4096
MOST_CONTEXT_TOKENS = 1_000_000

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The scaffolding of some roles: ids of each piece, None where they are not known; `tokens` of all."""

    pieces: tuple[Ids, ...] | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens of a text or block; `ids` are empty where the tokenizer has none."""

    ids: Ids
    tokens: int


@dataclass(frozen=True, slots=True)
class Front:
    """Everything before the new question's own pieces, in one rendering of the past.

    `past` is as a plan holds it: the first `stripped` of its messages have no context. Of the turns the `cut` oldest
    are left out, and the oldest `stripped_turns`, those included, do not stand with their chunks. The ids of `parts`,
    which end with the scaffolding before the question, come before the question and `closing` behind it; both are
    None where ids are not known. `tokens` counts all of them, without the question.
    """

    past: tuple[PastMessage, ...]
    stripped: int
    cut: int
    stripped_turns: int
    parts: tuple[Ids, ...] | None
    closing: Ids | None
    tokens: int

    @property
    def rendering(self) -> Rendering:
        return "kept" if any(message.context is not None for message in self.past) else "stripped"


class Frames:
    """What plans have in common, tokenized: scaffolding by roles, and past messages.

    The MOST_FRAMES last used frames are kept; of more than MOST_MESSAGES messages without a context, and of more than
    MOST_CONTEXT_TOKENS tokens in those with one, the oldest leave. Usable from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._kept: OrderedDict[tuple[Role, ...], Frame] = OrderedDict()
        self._plain: OrderedDict[tuple[Role, str], tuple[Block, Measured]] = OrderedDict()
        # With the context itself, so that its identity stays its own.
        self._contexts: OrderedDict[tuple[int, str], tuple[TurnContext | None, Block, Measured]] = OrderedDict()
        self._context_tokens = 0
        self._lock = Lock()

    def plain(self, message: PastMessage) -> tuple[Block, Measured]:
        """A message that stands as the client states it."""
        key = (message.role, message.content)
        kept = self._plain.get(key)
        if kept is None:
            block = past_block(message, "stripped")
            kept = (block, measured(block.pieces, self._tokenizer))
            with self._lock:
                self._plain[key] = kept
                while len(self._plain) > MOST_MESSAGES:
                    self._plain.popitem(last=False)
        return kept

    def kept(self, message: PastMessage) -> tuple[Block, Measured]:
        """A message with its context, which is found again while it is the same object as at the turn before."""
        key = (id(message.context), message.content)
        kept = self._contexts.get(key)
        if kept is None:
            block = past_block(message, "kept")
            size = measured(block.pieces, self._tokenizer)
            kept = (message.context, block, size)
            with self._lock:
                if key not in self._contexts:
                    self._contexts[key] = kept
                    self._context_tokens += size.tokens
                while self._context_tokens > MOST_CONTEXT_TOKENS:
                    self._context_tokens -= self._contexts.popitem(last=False)[1][2].tokens
        return kept[1], kept[2]

    def of(self, roles: tuple[Role, ...]) -> Frame:
        with self._lock:
            frame = self._kept.get(roles)
            if frame is not None:
                self._kept.move_to_end(roles)
                return frame
        frame = self._made(roles)
        with self._lock:
            self._kept[roles] = frame
            while len(self._kept) > MOST_FRAMES:
                self._kept.popitem(last=False)
        return frame

    def _made(self, roles: tuple[Role, ...]) -> Frame:
        texts = scaffolding(roles, self._tokenizer, self._template).pieces
        if texts is None:
            return Frame(None, UNKNOWN_SCAFFOLD_TOKENS * (len(roles) + 1))
        # Long histories repeat a few pieces: each is tokenized once.
        ids = {text: self._tokenizer.encode_scaffold(text) for text in set(texts)}
        pieces = tuple(ids[text] for text in texts)
        return Frame(pieces, sum(map(len, pieces)))


class Material:
    """One transcript and its question, for one plan. `bare` is the plan without past, chunks and evidence.

    `turns` are groups of the messages behind the fold; each begins with a user message, but for messages that stand
    before the first one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        frames: Frames,
        instructions: str,
        transcript: Transcript,
        bare: Plan,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._frames = frames
        self.bare = bare
        *head, self._question = blocks_of(instructions, bare)
        self._head = tuple(head)
        self._head_measured = [self._pieces(block.pieces) for block in head]
        self.turns = turns(transcript.past[transcript.folded :])
        self._bare_turns = [
            [message if message.context is None else PastMessage(message.role, message.content) for message in turn]
            for turn in self.turns
        ]
        sent_with = [[message for message in turn if message.context is not None] for turn in self.turns]
        self._contexts_before = list(accumulate(map(bool, sent_with), initial=0))
        self._fronts: dict[tuple[int, int], Front] = {}
        self._joined: dict[int, tuple[Front, Ids]] = {}
        self._standing: dict[int, dict[str, dict[str, str]]] = {}
        self._blocks: dict[int, tuple[Block, Measured, PastMessage]] = {}
        # With the heading that stands before a question with chunks.
        self.asked_tokens = self._pieces(
            user_pieces(TurnContext((), ("",), "", bare.facts), bare.question)[1:]
        ).tokens

    def front(self, cut: int, stripped: int) -> Front:
        """The front without the first `cut` turns and without the contexts of the first `stripped`."""
        front = self._fronts.get((cut, stripped))
        if front is None:
            front = self._fronts[cut, stripped] = self._front(cut, stripped)
        return front

    def _front(self, cut: int, stripped: int) -> Front:
        bare = flat(self._bare_turns[cut:stripped])
        past = (*bare, *repaired_references(flat(self.turns[max(cut, stripped) :])))
        entries = self._entries(past)
        unfitted = [*self._head, *(block for block, _, _ in entries), self._question]
        blocks = for_template(unfitted, self._template)
        frame = self._frames.of(tuple([block.role for block in blocks]))
        sizes = [*self._head_measured, *(measure for _, measure, _ in entries)]
        if len(blocks) < len(unfitted):
            # The template has no place for the system text: it stands in the first user message.
            sizes = [self._pieces(block.pieces) for block in blocks[:-1]]
        # Or, where no user message is past, before the question.
        lead = self._pieces(blocks[-1].pieces[: -len(self._question.pieces)])
        tokens = sum(item.tokens for item in sizes) + lead.tokens + frame.tokens
        parts: tuple[Ids, ...] | None = None
        if frame.pieces is not None:
            inner = zip(frame.pieces, [item.ids for item in sizes], strict=False)
            parts = (*chain.from_iterable(inner), frame.pieces[-2], lead.ids)
        return Front(
            past, len(bare), cut, max(cut, stripped), parts, frame.pieces[-1] if frame.pieces else None, tokens
        )

    def take_joined(self, front: Front, ids: Ids) -> None:
        """The front's ids, where somebody has joined them: who knows their hashes knows them by this very tuple."""
        self._joined[id(front)] = (front, ids)

    def chunks_standing(self, front: Front) -> dict[str, dict[str, str]]:
        """As `standing_texts` of the front's past; looked for once."""
        known = self._standing.get(id(front))
        if known is None:
            known = self._standing[id(front)] = standing_texts(front.past)
        return known

    def joined(self, front: Front) -> Ids:
        """The front's ids in one piece: these are packed and hashed much faster than many short ones."""
        known = self._joined.get(id(front))
        if known is None:
            ids: list[int] = []
            for part in front.parts or ():
                ids += part
            known = self._joined[id(front)] = (front, tuple(ids))
        return known[1]

    @property
    def has_ids(self) -> bool:
        """Whether tokenizer and template are known, so that the prompt's ids are."""
        # Of the same roles whatever is stripped: any front of all turns tells.
        known = next((front for (cut, _), front in self._fronts.items() if not cut), None)
        return (known or self.front(0, len(self.turns))).parts is not None

    def leading_turns(self, messages: int) -> int:
        """How many turns the first so many messages behind the fold make up, whole ones only."""
        count = 0
        for turn in self.turns:
            messages -= len(turn)
            if messages < 0:
                break
            count += 1
        return count

    def distinct(self, boundaries: Sequence[int]) -> list[int]:
        """Of numbers of stripped turns the first of those that leave the same contexts standing."""
        seen: dict[int, int] = {}
        for boundary in boundaries:
            seen.setdefault(self._contexts_before[boundary], boundary)
        return list(seen.values())

    def turn_tokens(self, turn: int, rendering: Rendering) -> int:
        """Tokens of one turn's messages, scaffolding left out."""
        messages = self._bare_turns[turn] if rendering == "stripped" else self.turns[turn]
        return sum([size.tokens for _, size, _ in self._entries(messages)])

    def tail(self, context: TurnContext) -> Measured:
        """The new question with what is put before it."""
        return self._pieces(user_pieces(context, self.bare.question))

    def reference_tokens(self, label: str) -> int:
        """At least what one more label adds to a line of references."""
        return self._tokenizer.count(f" [{label}],") + 1

    def reference_line_tokens(self) -> int:
        """At least what such a line takes beside its labels."""
        return self._tokenizer.count(f"{REFERENCES_MARK} \n\n") + 1

    def _entries(self, messages: Sequence[PastMessage]) -> list[tuple[Block, Measured, PastMessage]]:
        known = self._blocks
        return [known.get(id(message)) or self._entry(message) for message in messages]

    def _entry(self, message: PastMessage) -> tuple[Block, Measured, PastMessage]:
        """Kept by identity, with the message, so that its identity stays its own."""
        block, size = self._frames.plain(message) if message.context is None else self._frames.kept(message)
        entry = self._blocks[id(message)] = (block, size, message)
        return entry

    def _pieces(self, pieces: Sequence[Piece]) -> Measured:
        return measured(pieces, self._tokenizer)


def measured(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Measured:
    """The ids of all pieces, each tokenized by itself."""
    if not tokenizer.exact:
        return Measured((), sum(len(piece.token_ids) or tokenizer.count(piece.text) for piece in pieces))
    if len(pieces) == 1:
        # Most past messages: their remembered ids need no copy.
        own = pieces[0].token_ids or tokenizer.encode(pieces[0].text)
        return Measured(own, len(own))
    ids: list[int] = []
    for piece in pieces:
        ids += piece.token_ids or tokenizer.encode(piece.text)
    return Measured(tuple(ids), len(ids))
