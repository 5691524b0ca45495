"""Questions over two stores, in bursts by topic."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.datasets import mtrag
from bench.prefix_smoke import STORE, handbook_questions

PASSAGES_STORE = "mtrag"


@dataclass(frozen=True, slots=True)
class Question:
    """`topic` is the document that answers, or the conversation that it is from; `relevant` are MTRAG's passages."""

    store: str
    topic: str
    text: str
    relevant: tuple[int, ...] = ()


def in_bursts(questions: Sequence[Question], burst: int, seed: int) -> list[list[Question]]:
    """All questions: those of a topic in groups of at most `burst`, the groups of all topics shuffled."""
    topics: dict[str, list[Question]] = {}
    for question in questions:
        topics.setdefault(question.topic, []).append(question)
    groups = [
        of_topic[start : start + burst] for of_topic in topics.values() for start in range(0, len(of_topic), burst)
    ]
    random.Random(seed).shuffle(groups)
    return groups


def questions_of(count: int) -> list[Question]:
    """Half of each store, as far as they go, whole topics first."""
    handbook = [Question(STORE, question.document, question.text) for question in handbook_questions()]
    conversations: list[Question] = []
    topic = 0
    for asked in mtrag().questions:
        topic += asked.previous is None
        conversations.append(Question(PASSAGES_STORE, f"conversation {topic}", asked.text, asked.relevant))
    handbook.sort(key=lambda question: question.topic)
    half = min(count // 2, len(conversations))
    return [*conversations[:half], *handbook[: count - half]]
