"""RAGPulse: requests to a university's RAG service, as ids and token lengths of what each prompt was made of.

There is no text: each part is given token ids of its own, so that two prompts share tokens exactly where they share
parts. The second of the three system parts changes every day, the third with nearly every request.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.datasets import DataMissing, shared_data

Ids = tuple[int, ...]

_SIZES = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}


@dataclass(frozen=True, slots=True)
class Logged:
    """One request: parts of its prompt in the order in which they were sent. `passages` are most relevant first."""

    system: tuple[int, ...]
    passages: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def front(self) -> tuple[int, ...]:
        """The system parts that other requests have too."""
        return self.system[:2]

    @property
    def volatile(self) -> tuple[int, ...]:
        return self.system[2:]

    @property
    def distinct(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.passages))

    @property
    def repeated(self) -> tuple[int, ...]:
        """Passages that the service sent twice; they stay in the prompt, behind the others."""
        return tuple(part for place, part in enumerate(self.passages) if part in self.passages[:place])


class Trace:
    """All requests in the order of the log, and the token ids of their parts."""

    def __init__(self, requests: Sequence[Logged], sizes: Mapping[int, int]) -> None:
        self.requests = requests
        self._ids: dict[int, Ids] = {}
        first = 0
        for part, size in sizes.items():
            self._ids[part] = tuple(range(first, first + size))
            first += size
        self._joined: dict[tuple[int, ...], Ids] = {}

    def ids(self, part: int) -> Ids:
        return self._ids[part]

    def joined(self, parts: tuple[int, ...]) -> Ids:
        """The ids of a front, kept for the next request that has it."""
        known = self._joined.get(parts)
        if known is None:
            known = self._joined[parts] = self.concatenated(parts)
        return known

    def concatenated(self, parts: Sequence[int]) -> Ids:
        ids: list[int] = []
        for part in parts:
            ids += self._ids[part]
        return tuple(ids)


def ragpulse() -> Trace:
    """Raises DataMissing."""
    folder = shared_data() / "ragpulse"
    if not folder.is_dir():
        raise DataMissing("no ragpulse in data/ beside the repository (HEADSTART_SHARED_DIR names it)")
    sizes = {line[key]: line["token_length"] for name, key in _SIZES.items() for line in _lines(folder / name)}
    return Trace([_logged(line["hash_ids"]) for line in _lines(folder / "0_trace.jsonl")], sizes)


def _logged(parts: Mapping[str, Sequence[int]]) -> Logged:
    rest = (*parts["history"], *parts["web_search"], *parts["user_input"])
    return Logged(tuple(parts["sys_prompt"]), tuple(parts["passages_ids"]), rest)


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_bytes().splitlines():
        if line.strip():
            yield orjson.loads(line)
