"""Past turns that are stated again: decoded once, measured once, within bounds."""

import pytest

from prompt_builder.labels import Renderer
from prompt_builder.material import Frames
from prompt_builder.stored import CorruptValue, DecodedTurns, StoredTurn, decode_turn, encode_turn
from prompt_builder.template import ChatTemplate
from prompt_builder.types import PastMessage, PromptChunk, TurnContext
from tests.support.prompts import CHATML, ByteTokenizer

TOKENIZER = ByteTokenizer()


def context(name: str) -> TurnContext:
    rendered = Renderer(TOKENIZER).render(name, f"The {name} leaves at nine.")
    chunk = PromptChunk(rendered.label, name, f"{name}.md", name, 0.5, f"The {name} leaves at nine.", rendered)
    return TurnContext((chunk,), (), "", "")


def raw(name: str) -> bytes:
    return encode_turn(StoredTurn(context(name), 0, 1.0))


def test_equal_bytes_give_the_same_turn() -> None:
    turns = DecodedTurns()
    once, again = turns.get(raw("ferry")), turns.get(bytes(bytearray(raw("ferry"))))
    assert once is again
    assert once == decode_turn(raw("ferry"))
    assert turns.get(raw("barge")) != once


def test_the_turns_that_were_used_last_are_held_within_the_bound() -> None:
    one = len(raw("ferry"))
    turns = DecodedTurns(most_bytes=2 * one + one // 2)
    first = turns.get(raw("ferry"))
    turns.get(raw("barge"))
    assert turns.get(raw("ferry")) is first
    turns.get(raw("canoe"))
    assert turns.bytes_held <= 2 * one + one // 2
    assert turns.get(raw("ferry")) is first


def test_what_cannot_be_read_is_not_held() -> None:
    turns = DecodedTurns()
    for _ in range(2):
        with pytest.raises(CorruptValue):
            turns.get(b"[1]")
    assert turns.bytes_held == 0


def test_a_message_is_measured_once_while_its_context_is_the_same() -> None:
    frames = Frames(TOKENIZER, ChatTemplate(CHATML))
    before = context("ferry")
    block, size = frames.kept(PastMessage("user", "When?", before))
    assert frames.kept(PastMessage("user", "When?", before))[0] is block
    assert frames.kept(PastMessage("user", "Where?", before))[0] != block
    other, other_size = frames.kept(PastMessage("user", "When?", context("ferry")))
    assert other is not block
    assert (other, other_size) == (block, size)
    assert size.tokens == len(size.ids) == len(block.content.encode())
