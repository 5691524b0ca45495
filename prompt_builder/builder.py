"""Plan in, prompt out: segments tokenized one by one, their ids joined, the same content as messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.hash_memo import HashMemo
from cache.prompt_tree import PromptTree
from prompt_builder.layout import (
    UNKNOWN_SCAFFOLD_TOKENS,
    Block,
    Piece,
    blocks_of,
    for_template,
    piece_tokens,
    question_block,
    scaffolding,
)
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Message, Plan, Prompt, Segment, Tokenizer

NOTHING = Prompt((), (), (), 0, ())


@dataclass(frozen=True, slots=True)
class Opening:
    """All of a prompt before its question's own pieces, rendered under a salt; `closing` comes behind these.

    Every plan that `begins` so has it. Its `prompt` has token ids, and hashes of its own whole blocks.
    """

    plan: Plan
    salt: str
    prompt: Prompt
    closing: str

    def begins(self, plan: Plan, salt: str) -> bool:
        own = self.plan
        return (
            salt == self.salt
            and (own.past, own.stripped, own.rendering, own.system, own.summary)
            == (
                plan.past,
                plan.stripped,
                plan.rendering,
                plan.system,
                plan.summary,
            )
            and own.instructed == plan.instructed
        )


class PromptBuilder:
    """Renders plans. `block_size` is the engine's, in tokens; 0 where it is not known: no block hashes then.

    Blocks that an earlier prompt had in the same place are not hashed again.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, instructions: str, block_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instructions = instructions
        self._block_size = block_size
        self._hashes = HashMemo()

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
        unfitted = blocks_of(self._instructions, plan)
        blocks = for_template(unfitted, self._template)
        frame = scaffolding([block.role for block in blocks], self._tokenizer, self._template)
        if frame.pieces is None or len(blocks) < len(unfitted):
            return None
        segments = self._segments(frame.pieces[:-1], blocks[:-1])
        messages = tuple(block.message() for block in blocks[:-1])
        return Opening(plan, salt, self._joined(segments, messages, salt), frame.pieces[-1])

    def _behind(self, opening: Opening, question: Block, exact: bool, reason: str | None) -> Prompt:
        """The whole prompt behind its rendered opening."""
        before = opening.prompt
        own = [*map(self._segment, question.pieces), self._scaffold(opening.closing)]
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
        token_ids = (*(before.token_ids or ()), *joined)
        segments, messages = (*before.segments, *own), (*before.messages, *messages)
        if not exact:
            return Prompt(segments, messages, None, len(token_ids), (), reason or "Not asked for.")
        size = self._block_size
        hashes = self._hashes.block_hashes(token_ids, size, salt, before.block_hashes) if size else ()
        return Prompt(segments, messages, token_ids, len(token_ids), hashes)

    def _scaffold(self, text: str) -> Segment:
        return Segment("scaffold", text, self._tokenizer.encode_scaffold(text))

    def _segment(self, piece: Piece) -> Segment:
        return Segment(piece.kind, piece.text, piece.token_ids or self._tokenizer.encode(piece.text), piece.label)
