"""Plan in, prompt out: segments tokenized one by one, their ids joined, the same content as messages."""

from collections.abc import Sequence

from cache.hash_memo import HashMemo
from cache.prompt_tree import PromptTree
from prompt_builder.layout import (
    UNKNOWN_SCAFFOLD_TOKENS,
    Block,
    Piece,
    blocks_of,
    for_template,
    piece_tokens,
    scaffolding,
)
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Message, Plan, Prompt, Segment, Tokenizer


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

    def render(self, plan: Plan, salt: str = "", *, exact: bool = True, reason: str | None = None) -> Prompt:
        """The prompt of a plan. `exact` False, with a reason: no token ids, the engine templates `messages`.

        The same plan gives the same bytes. `salt` (the tenant's) goes into the first block's hash.
        """
        return self._prompt(blocks_of(self._instructions, plan), salt, exact, reason)

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
        segments: list[Segment] = []
        for before, block in zip(frame.pieces, blocks, strict=False):
            segments.append(self._scaffold(before))
            segments.extend(self._segment(piece) for piece in block.pieces)
        segments.append(self._scaffold(frame.pieces[-1]))
        joined: list[int] = []
        for segment in segments:
            joined += segment.token_ids
        token_ids = tuple(joined)
        if not exact:
            return Prompt(tuple(segments), messages, None, len(token_ids), (), reason or "Not asked for.")
        hashes = self._hashes.block_hashes(token_ids, self._block_size, salt) if self._block_size else ()
        return Prompt(tuple(segments), messages, token_ids, len(token_ids), hashes)

    def _scaffold(self, text: str) -> Segment:
        return Segment("scaffold", text, self._tokenizer.encode_scaffold(text))

    def _segment(self, piece: Piece) -> Segment:
        return Segment(piece.kind, piece.text, piece.token_ids or self._tokenizer.encode(piece.text), piece.label)
