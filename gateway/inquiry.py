"""What a probe asks of its engine: all of it once, and then only as much as tells whether that still holds."""

from collections.abc import Callable
from dataclasses import replace

import aiohttp

from gateway.backends.facts import Answer, EngineCaller, EngineFacts, probe_engine
from gateway.endpoints import Endpoint
from gateway.settings import Settings

_INCONCLUSIVE_PROBES = 5
_ASK_AGAIN_PROBES = 12
"""An engine that answered no probe request so far is asked again at every so many probes."""

_SOURCES_LIMIT_S = 5.0


class Inquiry:
    """Asks one engine. `corrected` is applied to what it tells: requests may have shown more than that."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        settings: Settings,
        corrected: Callable[[EngineFacts], EngineFacts],
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._settings = settings
        self._corrected = corrected
        self._inconclusive = 0
        self._probes = 0

    async def facts(self, known: EngineFacts) -> EngineFacts:
        """What it is now, `known` itself where nothing has changed. Never raises for what an engine does.

        The full questions are asked only until they are answered, or it changed; of a process that answers again
        after a silence all is known already. What was known of the model of an engine that is gone stays: it still
        shapes prompts and chunks until it comes back.
        """
        self._probes += 1
        given_up = self._inconclusive >= _INCONCLUSIVE_PROBES and self._probes % _ASK_AGAIN_PROBES != 0
        back = replace(known, reachable=True, error=None)
        settled = (back.conclusive and (known.reachable or known.started_s is not None)) or (
            known.reachable and given_up
        )
        facts = await self._asked(chat=not settled)
        if settled and facts.reachable:
            unchanged = facts.same_engine(back) and facts.prefix_caching in (None, known.prefix_caching)
            if known.reachable and unchanged:
                return known
            same_process = unchanged and facts.started_s == known.started_s
            facts = back if same_process else await self._asked(chat=True)
        self._inconclusive = self._inconclusive + 1 if facts.reachable and not facts.conclusive else 0
        return facts if facts.reachable else known.gone(facts.error)

    async def event_sources(self) -> object:
        """Its word on where it publishes KV events; None where it gives none."""
        caller = EngineCaller(self._session, self._endpoint.url, self._settings.engine_api_key, self._endpoint.host)
        answer = await caller.get("/kv_event_sources", _SOURCES_LIMIT_S)
        return answer.body if isinstance(answer, Answer) and answer.ok else None

    async def _asked(self, *, chat: bool) -> EngineFacts:
        return self._corrected(
            await probe_engine(
                self._session,
                self._endpoint.url,
                self._settings.engine_api_key,
                model=self._settings.model,
                chat=chat,
                host=self._endpoint.host,
            )
        )
