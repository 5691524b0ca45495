"""The public data sets that benches measure on: XQuAD and MTRAG, read from `../shared/data`."""

import ast
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import CannotRun


class DataMissing(CannotRun):
    """The data set is not on this machine; the message says where it was looked for."""


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """`relevant` are indexes into the passages; `previous` is the user turn before, where there is one."""

    text: str
    relevant: tuple[int, ...]
    answers: tuple[str, ...] = ()
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]


def shared_data() -> Path:
    """The folder named by `HEADSTART_SHARED_DIR` (or `data` in it), or `../shared/data` beside the repository."""
    named = os.environ.get("HEADSTART_SHARED_DIR")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder / "data" if (folder / "data").is_dir() else folder


def xquad(language: str) -> RetrievalSet:
    """240 paragraphs, 1,190 questions; `language` is `en` or `vi`. Raises DataMissing."""
    document = _read(f"xquad/xquad.{language}.json")
    passages: list[Passage] = []
    questions: list[Question] = []
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                questions.append(Question(asked["question"], (len(passages),), answers))
            passages.append(Passage(f"{language}-{len(passages)}", article["title"], paragraph["context"]))
    return RetrievalSet(f"XQuAD {language}", tuple(passages), tuple(questions))


def mtrag() -> RetrievalSet:
    """350 passages, and the 150 of 159 turns that have reference passages among them. Raises DataMissing."""
    document = _read("mtrag/reference_subset.json")
    passages = tuple(
        Passage(found["document_id"], found.get("title") or "", found["text"]) for found in document["documents"]
    )
    position = {passage.id: index for index, passage in enumerate(passages)}
    questions: list[Question] = []
    for task in document["tasks"]:
        turns = [turn["text"] for turn in _value(task["input"]) if turn["speaker"] == "user"]
        wanted = [
            position[context["document_id"]] for context in task["contexts"] if context["document_id"] in position
        ]
        if wanted:
            answers = tuple(target["text"] for target in _value(task.get("targets", [])))
            previous = turns[-2] if len(turns) > 1 else None
            questions.append(Question(turns[-1], tuple(wanted), answers, previous))
    return RetrievalSet("MTRAG", passages, tuple(questions))


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One task of a conversation: the user's turn and the reference answer that follows it."""

    user: str
    answer: str


def mtrag_conversations() -> tuple[tuple[ConversationTurn, ...], ...]:
    """The conversations in order of appearance, each with its turns in order. Raises DataMissing."""
    document = _read("mtrag/reference_subset.json")
    conversations: dict[str, dict[int, ConversationTurn]] = {}
    for task in document["tasks"]:
        name, _, number = task["task_id"].partition("<::>")
        users = [turn["text"] for turn in _value(task["input"]) if turn["speaker"] == "user"]
        targets = _value(task.get("targets", []))
        answer = targets[0]["text"] if targets else ""
        conversations.setdefault(name, {})[int(number)] = ConversationTurn(users[-1], answer)
    return tuple(tuple(turns[number] for number in sorted(turns)) for turns in conversations.values())


def _read(name: str) -> Any:
    path = shared_data() / name
    if not path.is_file():
        raise DataMissing(f"no {name} in {shared_data().name}/ beside the repository (HEADSTART_SHARED_DIR names it)")
    return json.loads(path.read_text(encoding="utf-8"))


def _value(found: Any) -> Any:
    # Some exports of the set hold nested values as Python literals in text.
    return ast.literal_eval(found) if isinstance(found, str) else found
