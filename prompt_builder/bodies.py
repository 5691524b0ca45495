"""The texts of chunks in sentences, with the terms that each holds: what evidence and extracts are both found by."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from prompt_builder.labels import as_data
from prompt_builder.sentences import Sentence, split, terms_of

MEMO_BODIES = 1024


@dataclass(frozen=True, slots=True)
class Body:
    """A chunk's text. `places` gives the numbers of the sentences that hold a term, ascending; `terms` how many
    different ones each sentence holds."""

    sentences: tuple[Sentence, ...]
    terms: tuple[int, ...]
    places: dict[str, tuple[int, ...]]


class SentenceMemo:
    """The sentences of the MEMO_BODIES chunks last used. Safe to share between threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Body] = OrderedDict()
        self._lock = Lock()

    def of(self, body: str) -> Body:
        with self._lock:
            kept = self._kept.get(body)
            if kept is not None:
                self._kept.move_to_end(body)
                return kept
        made = body_of(body)
        with self._lock:
            self._kept[body] = made
            while len(self._kept) > MEMO_BODIES:
                self._kept.popitem(last=False)
        return made


def body_of(text: str) -> Body:
    sentences = tuple(split(as_data(text).strip()))
    terms = [terms_of(sentence.text) for sentence in sentences]
    places: dict[str, list[int]] = {}
    for number, held in enumerate(terms):
        for term in held:
            places.setdefault(term, []).append(number)
    return Body(sentences, tuple(map(len, terms)), {term: tuple(numbers) for term, numbers in places.items()})
