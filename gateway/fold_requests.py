"""What a fold takes, and what it asks of the engine. Pure; all of it takes time with the length of the texts."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.turns import Turn
from prompt_builder.choice import turns
from prompt_builder.history import Marks, turns_to_fold
from prompt_builder.layout import Block, block_tokens, past_block
from prompt_builder.sentences import sentences
from prompt_builder.types import Plan, Prompt

MESSAGE_TOKENS = 5
"""About what a chat template puts around one message."""

INSTRUCTION = (
    "Summarise the conversation so far in at most {words} words, so that it can go on from the summary alone. Keep "
    "names, numbers, dates, decisions, and what the user said about themselves and wants. Write plain sentences and "
    "nothing else."
)


def messages_to_fold(turn: Turn, at: Marks) -> int:
    """How many of the past messages to fold, counted from the start of the past; 0: none.

    Only what the client has sent as history counts. The answer just given may be to a request for a title or tags,
    which no later request goes on from: it never makes a chat fold.
    """
    transcript, plan, tokenizer = turn.transcript, turn.plan, turn.serving.tokenizer
    cut = len(transcript.past) - len(plan.past)
    groups = turns(transcript.past[transcript.folded :])
    place, sizes = transcript.folded, []
    for group in groups:
        blocks = []
        for message in group:
            blocks.append(_rendered(plan, place - cut) if place >= cut else past_block(message, "stripped"))
            place += 1
        sizes.append(sum(block_tokens(block, tokenizer) + MESSAGE_TOKENS for block in blocks))
    folded = turns_to_fold(sizes, tokenizer.count(transcript.summary) if transcript.summary else 0, at)
    return transcript.folded + sum(map(len, groups[:folded])) if folded else 0


def _rendered(plan: Plan, place: int) -> Block:
    return past_block(plan.past[place], "stripped" if place < plan.stripped else plan.rendering)


def summary_prompt(turn: Turn, messages: int, at: Marks) -> Prompt | None:
    """What was sent up to the last turn to fold, and one instruction: all but the instruction is resident.

    None where the engine has seen none of these turns, or the window has no room.
    """
    transcript, sent = turn.transcript, turn.plan
    shown = messages - (len(transcript.past) - len(sent.past))
    if shown <= 0:
        return None
    most_tokens = at.prose_tokens
    plan = replace(
        sent,
        past=sent.past[:shown],
        stripped=min(sent.stripped, shown),
        chunks=(),
        references=(),
        evidence="",
        facts="",
        question=INSTRUCTION.format(words=max(10, most_tokens * 3 // 5)),
    )
    exact = turn.prompt.token_ids is not None
    prompt = turn.serving.builder.render(
        plan, turn.context.cache_salt, exact=exact, reason=turn.prompt.inexact_reason
    )
    window = turn.serving.facts.max_model_len
    return prompt if window is None or prompt.tokens + most_tokens <= window else None


def finished(text: str, whole: bool) -> str:
    """Without the last sentence of an answer that ended in the middle of it."""
    found = sentences(text)
    return " ".join(found if whole or len(found) < 2 else found[:-1])


def front_to_compute(turn: Turn, answer: str, prompt: Prompt) -> int:
    """Tokens before the next prompt's question that this turn's prompt and answer did not leave in the cache."""
    sent, ids = turn.prompt.token_ids, prompt.token_ids
    if sent is None or ids is None:
        return 0
    held = (*sent, *turn.serving.tokenizer.encode(answer))
    shared = _shared(held, ids)
    question = max(at for at, segment in enumerate(prompt.segments) if segment.kind == "question")
    return sum(len(segment.token_ids) for segment in prompt.segments[:question]) - shared


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
