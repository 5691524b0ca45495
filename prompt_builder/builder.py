"""Plan in, prompt out: segments tokenized one by one, their ids joined, the same content as messages."""

from collections.abc import Sequence
from dataclasses import replace

import orjson

from cache.hash_memo import HashMemo
from cache.prompt_tree import PromptTree
from prompt_builder.layout import (
    UNKNOWN_SCAFFOLD_TOKENS,
    Block,
    Piece,
    blocks_of,
    for_template,
    past_block,
    piece_tokens,
    question_block,
    scaffolding,
)
from prompt_builder.openings import Opening, Openings
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Message, Plan, Prompt, Segment, Tokenizer

NOTHING = Prompt((), (), (), 0, ())


class PromptBuilder:
    """Renders plans. `block_size` is the engine's, in tokens; 0 where it is not known: no block hashes then.

    Blocks that an earlier prompt had in the same place are not hashed again, and of a long conversation's `opening`
    only what is new is rendered.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, instructions: str, block_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instructions = instructions
        self._block_size = block_size
        self._hashes = HashMemo()
        self._openings = Openings()

    @property
    def block_size(self) -> int:
        """In tokens; 0 where it is not known."""
        return self._block_size

    def tree(
        self, salt: str = "", token_ids: tuple[int, ...] | None = None, hashes: Sequence[bytes] = ()
    ) -> PromptTree | None:
        """For following one request's prompts through replicas: it knows the blocks of prompts rendered before.

        Who follows these very `token_ids` of a prompt, with these block hashes, hashes nothing. None where there are
        no block hashes.
        """
        if not self._block_size:
            return None
        tree = PromptTree(self._block_size, salt, self._hashes)
        if token_ids is not None:
            tree.hashed(token_ids, hashes)
        return tree

    def render(
        self,
        plan: Plan,
        salt: str = "",
        *,
        exact: bool = True,
        reason: str | None = None,
        opening: Opening | None = None,
    ) -> Prompt:
        """The prompt of a plan. `exact` False, with a reason: no token ids, the engine templates `messages`.

        The same plan gives the same bytes. `salt` (the tenant's) goes into the first block's hash. An `opening` that
        the plan begins with is not rendered again.
        """
        if opening is not None and opening.begins(plan, salt):
            return self._behind(opening, question_block(plan), exact, reason)
        return self._prompt(blocks_of(self._instructions, plan), salt, exact, reason)

    def opening(self, plan: Plan, salt: str = "") -> Opening | None:
        """What plans with this past and this system text have in common, whatever their question.

        None where ids are not known, and where the system text stands in a message that it shares.
        """
        known = self._openings.of(plan, salt)
        if known is not None and (grown := self._grown(known, plan)) is not None:
            return grown
        unfitted = blocks_of(self._instructions, plan)
        blocks = for_template(unfitted, self._template)
        roles = [block.role for block in blocks]
        pieces = scaffolding(roles, self._tokenizer, self._template).pieces
        if pieces is None or len(blocks) < len(unfitted):
            return None
        segments = self._segments(pieces[:-1], blocks[:-1])
        prompt = self._joined(segments, tuple(block.message() for block in blocks[:-1]), salt)
        prompt = replace(prompt, ids_json=orjson.dumps(prompt.token_ids))
        return self._openings.keep(Opening(plan, salt, _hashed(prompt), tuple(roles[:-1]), pieces))

    def _grown(self, known: Opening, plan: Plan) -> Opening | None:
        """The opening of a plan whose past goes on from a known one; None where the template tells it otherwise."""
        first = len(known.plan.past)
        new = [
            past_block(message, "stripped" if place < plan.stripped else plan.rendering)
            for place, message in enumerate(plan.past[first:], start=first)
        ]
        if not new or not first:
            # Other conversations begin with the same system text.
            self._openings.keep(known, instead_of=known)
        if not new:
            return known
        roles = (*known.roles, *(block.role for block in new))
        pieces = scaffolding((*roles, "user"), self._tokenizer, self._template).pieces
        before = known.pieces[:-1]
        if pieces is None or pieces[: len(before)] != before:
            return None
        own: list[Segment] = []
        for block, behind in zip(new, pieces[len(before) : -1], strict=True):
            own += [*map(self._segment, block.pieces), self._scaffold(behind)]
        messages = tuple(block.message() for block in new)
        prompt = self._joined(own, messages, known.salt, before=known.prompt)
        made = Opening(plan, known.salt, _hashed(prompt), roles, pieces)
        return self._openings.keep(made, instead_of=known if first else None)

    def _behind(self, opening: Opening, question: Block, exact: bool, reason: str | None) -> Prompt:
        """The whole prompt behind its rendered opening."""
        before = opening.prompt
        own = [*map(self._segment, question.pieces), self._scaffold(opening.pieces[-1])]
        return self._joined(own, (question.message(),), opening.salt, exact=exact, reason=reason, before=before)

    def passthrough(
        self, messages: Sequence[Message], salt: str = "", *, exact: bool = True, reason: str | None = None
    ) -> Prompt:
        """The prompt of messages as they stand, without the gateway's instructions."""
        blocks = [Block(message.role, (Piece("turn", message.content),)) for message in messages]
        return self._prompt(blocks, salt, exact, reason)

    def _prompt(self, unfitted: Sequence[Block], salt: str, exact: bool, reason: str | None) -> Prompt:
        blocks = for_template(unfitted, self._template)
        messages = tuple(block.message() for block in blocks)
        frame = scaffolding([block.role for block in blocks], self._tokenizer, self._template)
        if frame.pieces is None:
            contents = [self._segment(piece) for block in blocks for piece in block.pieces]
            counted = sum(piece_tokens(piece, self._tokenizer) for block in blocks for piece in block.pieces)
            tokens = counted + UNKNOWN_SCAFFOLD_TOKENS * (len(blocks) + 1)
            return Prompt(tuple(contents), messages, None, tokens, (), reason or frame.reason)
        return self._joined(self._segments(frame.pieces, blocks), messages, salt, exact=exact, reason=reason)

    def _segments(self, scaffolds: Sequence[str], blocks: Sequence[Block]) -> list[Segment]:
        """The blocks, with a piece of scaffolding before each and one behind the last."""
        segments: list[Segment] = []
        for before, block in zip(scaffolds, blocks, strict=False):
            segments.append(self._scaffold(before))
            segments.extend(self._segment(piece) for piece in block.pieces)
        segments.append(self._scaffold(scaffolds[-1]))
        return segments

    def _joined(
        self,
        own: Sequence[Segment],
        messages: tuple[Message, ...],
        salt: str,
        *,
        exact: bool = True,
        reason: str | None = None,
        before: Prompt = NOTHING,
    ) -> Prompt:
        """The prompt of these segments and messages, behind those `before`."""
        joined: list[int] = []
        for segment in own:
            joined += segment.token_ids
        # Added, not unpacked into a third: that would go through all ids of a long prompt three times.
        token_ids = (before.token_ids or ()) + tuple(joined)
        segments, messages = (*before.segments, *own), (*before.messages, *messages)
        if not exact:
            return Prompt(segments, messages, None, len(token_ids), (), reason or "Not asked for.")
        size = self._block_size
        hashes = self._hashes.late_hashes(token_ids, size, salt, before.block_hashes) if size else ()
        json = None if before.ids_json is None else _longer(before.ids_json, joined)
        return Prompt(segments, messages, token_ids, len(token_ids), hashes, ids_json=json)

    def _scaffold(self, text: str) -> Segment:
        return Segment("scaffold", text, self._tokenizer.encode_scaffold(text))

    def _segment(self, piece: Piece) -> Segment:
        return Segment(piece.kind, piece.text, piece.token_ids or self._tokenizer.encode(piece.text), piece.label)


def _hashed(prompt: Prompt) -> Prompt:
    """With the hashes of all its blocks, once for the turns to come."""
    return replace(prompt, block_hashes=tuple(prompt.block_hashes))


def _longer(ids_json: bytes, more: list[int]) -> bytes:
    """A JSON list of ids, none of them empty, with more behind them."""
    return b",".join((memoryview(ids_json)[:-1], orjson.dumps(more)[1:])) if more else ids_json
