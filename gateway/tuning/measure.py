"""One question under one setting: asked, timed and question."""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from gateway.cli.client import GatewayClient, GatewayDown
from gateway.cli.terminal import CliError
from gateway.tuning.grid import Setting
from gateway.tuning.journal import Measurement
from gateway.tuning.questions import Question


class Meter:
    """Asks as a client would, streamed, greedily and briefly."""

    def __init__(self, client: GatewayClient, model: str, max_tokens: int, run: str) -> None:
        """`run` keeps this sweep's prompts apart from those of any other."""
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._run = run

    async def measure(
        self, setting: Setting, place: int, question: Question, store_id: str, *, warm_up: bool = False
    ) -> Measurement:
        """Raises GatewayDown; every other failure is told in the measurement.

        A mark of the setting stands in the system text, so that the engine's prefix cache serves a setting with what
        that setting itself has sent, as it would in use, and never with what another one has. A `warm_up` has a mark
        of its own.
        """
        mark = hashlib.sha256(b"" if warm_up else setting.name.encode()).hexdigest()[:6]
        body = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": f"({self._run}-{mark})"},
                {"role": "user", "content": question.text},
            ],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "headstart": {"vector_store_ids": [store_id], **setting.extension()},
        }
        pieces: list[str] = []
        told: Mapping[str, Any] = {}
        error = ""
        first_ms: float | None = None
        began = time.perf_counter()
        try:
            async for delta in self._client.chat(body):
                if first_ms is None and delta.text:
                    first_ms = _ms_since(began)
                pieces.append(delta.text)
                told = delta.extension if delta.extension is not None else told
        except GatewayDown:
            raise
        except CliError as failure:
            error = failure.message
        total_ms = _ms_since(began)
        if error:
            return Measurement(
                setting.name, place, total_ms, recall=question.recall(()), words=question.words_found(""), error=error
            )
        return _measured(setting, place, question, "".join(pieces), told, first_ms, total_ms)


def _measured(
    setting: Setting,
    place: int,
    question: Question,
    reply: str,
    told: Mapping[str, Any],
    first_ms: float | None,
    total_ms: float,
) -> Measurement:
    timings = _object(told.get("timings"))
    forecast = _object(_object(told.get("plan")).get("forecast"))
    citations = [_object(citation) for citation in told.get("citations") or ()]
    return Measurement(
        setting=setting.name,
        question=place,
        total_ms=round(total_ms, 3),
        ttft_ms=_number(timings.get("ttft_ms")) or first_ms,
        client_ttft_ms=None if first_ms is None else round(first_ms, 3),
        forecast_ms=_number(forecast.get("safe_ttft_ms")),
        forecast_budget_ms=_number(forecast.get("budget_ms")),
        prompt_tokens=_count(timings.get("prompt_tokens")),
        cached_tokens=_count(timings.get("cached_tokens")),
        output_tokens=_count(timings.get("output_tokens")),
        chunks=len(citations),
        recall=question.recall({str(citation.get("filename", "")) for citation in citations}),
        words=question.words_found(reply),
    )


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None
