"""A small client of the gateway's own HTTP interface, for the commands."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import orjson

from gateway.backends.sse import EventSplitter, event_data
from gateway.cli.terminal import USAGE, CliError

PAGE = 100


class GatewayDown(CliError):
    """Nobody answers at the gateway's address."""


@dataclass(slots=True, eq=False)
class Refused(CliError):
    """The gateway answered with an error; `status` is its HTTP status."""

    status: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """A vector store as the gateway lists it."""

    id: str
    name: str
    files: Mapping[str, int]
    usage_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file's place in a store. `status`: in_progress, completed, failed or cancelled."""

    id: str
    status: str
    error: str
    attributes: Mapping[str, Any]
    filename: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer; the last piece carries `extension`, the response's `headstart` object."""

    text: str
    extension: Mapping[str, Any] | None = None


class GatewayClient:
    """Owns one HTTP session; use as `async with`. Every failure is a CliError of one line."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 60.0, read_timeout_s: float = 600.0) -> None:
        """`timeout_s` bounds a plain call, `read_timeout_s` each read of an answer or an upload."""
        if not url.startswith(("http://", "https://")):
            raise CliError(f"'{url}' is not the address of a gateway: it starts with http:// or https://.", USAGE)
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._plain = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        self._long = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=read_timeout_s)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=16))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    # what is there

    async def ready(self) -> dict[str, Any]:
        """The body of `/readyz`, whatever its status."""
        return _object(await self._call("GET", "/readyz", accept=(200, 503)))

    async def models(self) -> list[str]:
        """Names of the served models, those with a store (`MODEL@STORE`) left out."""
        listing = _object(await self._call("GET", "/v1/models"))
        names = [str(model.get("id", "")) for model in listing.get("data", [])]
        return [name for name in names if name and "@" not in name]

    async def calls(self, limit: int) -> list[dict[str, Any]]:
        """Recent requests, newest first."""
        body = await self._call("GET", f"/v1/calls?limit={limit}")
        return list(body) if isinstance(body, list) else list(_object(body).get("data", []))

    async def replicas(self) -> list[dict[str, Any]]:
        """The engines behind the gateway."""
        return list(_object(await self._call("GET", "/v1/replicas")).get("data", []))

    async def stores(self) -> list[Store]:
        """All stores, newest first."""
        return [_store(entry) async for entry in self._pages("/v1/vector_stores")]

    async def find_store(self, name: str) -> Store | None:
        """The store of this name or id; the oldest where several share a name, as in the model name MODEL@STORE."""
        found = [store for store in await self.stores() if name in (store.id, store.name)]
        return found[-1] if found else None

    async def require_store(self, name: str) -> Store:
        store = await self.find_store(name)
        if store is None:
            known = ", ".join(sorted(store.name for store in await self.stores())) or "none"
            raise CliError(f"No store '{printable_name(name)}'. Known: {known}.", USAGE)
        return store

    async def store_files(self, store_id: str) -> list[StoreFile]:
        return [_store_file(entry) async for entry in self._pages(f"/v1/vector_stores/{_part(store_id)}/files")]

    async def store_file(self, store_id: str, file_id: str) -> StoreFile:
        path = f"/v1/vector_stores/{_part(store_id)}/files/{_part(file_id)}"
        return _store_file(await self._call("GET", path))

    # what is changed

    async def create_store(self, name: str, expires_after_days: int | None = None) -> Store:
        """The gateway removes a store that has not been used for `expires_after_days`."""
        body: dict[str, Any] = {"name": name}
        if expires_after_days is not None:
            body["expires_after"] = {"anchor": "last_active_at", "days": expires_after_days}
        return _store(await self._call("POST", "/v1/vector_stores", body))

    async def delete_store(self, store_id: str) -> None:
        await self._call("DELETE", f"/v1/vector_stores/{_part(store_id)}")

    async def upload(self, path: Path, filename: str) -> str:
        """Sends a file; returns its id."""
        with path.open("rb") as content:
            form = aiohttp.FormData(quote_fields=False)  # names go as they are, as other clients send them
            form.add_field("purpose", "assistants")
            form.add_field("file", content, filename=filename, content_type="application/octet-stream")
            return str(_object(await self._send("POST", "/v1/files", form, self._long)).get("id", ""))

    async def attach(
        self, store_id: str, file_id: str, attributes: Mapping[str, Any], chunking: tuple[int, int] | None = None
    ) -> StoreFile:
        """`chunking`: most tokens of a chunk and tokens that neighbours share; None as the gateway is set."""
        body: dict[str, Any] = {"file_id": file_id, "attributes": dict(attributes)}
        if chunking is not None:
            sizes = {"max_chunk_size_tokens": chunking[0], "chunk_overlap_tokens": chunking[1]}
            body["chunking_strategy"] = {"type": "static", "static": sizes}
        return _store_file(await self._call("POST", f"/v1/vector_stores/{_part(store_id)}/files", body))

    async def remove(self, store_id: str, file_id: str) -> None:
        """Takes a file out of the store and deletes it."""
        await self._call("DELETE", f"/v1/vector_stores/{_part(store_id)}/files/{_part(file_id)}")
        await self._call("DELETE", f"/v1/files/{_part(file_id)}", accept=(200, 404))

    # what is asked

    async def chat(self, body: Mapping[str, Any]) -> AsyncIterator[Delta]:
        """Streams an answer. Raises Refused for an error before or inside the stream, and for a cut stream."""
        payload = orjson.dumps({**body, "stream": True})
        headers = {"content-type": "application/json"}
        splitter = EventSplitter()
        finished = False
        try:
            async with self._session.post(
                self._url + "/v1/chat/completions", data=payload, headers=headers, timeout=self._long
            ) as response:
                if response.status != 200:
                    raise _refused(response.status, await response.read())
                async for data in response.content.iter_any():
                    for event in splitter.feed(data):
                        chunk = event_data(event)
                        if chunk == b"[DONE]":
                            return
                        if chunk:
                            delta, ends = _delta(chunk)
                            finished = finished or ends
                            if delta is not None:
                                yield delta
        except (aiohttp.ClientError, OSError) as error:
            raise self._down(error) from error
        if not finished:
            raise CliError("The answer was cut off before its end.")

    # transport

    async def _pages(self, path: str) -> AsyncIterator[dict[str, Any]]:
        after = ""
        while True:
            page = _object(await self._call("GET", f"{path}?limit={PAGE}{after}"))
            entries = [entry for entry in page.get("data", []) if isinstance(entry, dict)]
            for entry in entries:
                yield entry
            if not page.get("has_more") or not entries:
                return
            after = f"&after={_part(str(entries[-1]['id']))}"

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, accept: tuple[int, ...] = (200,)
    ) -> Any:
        data = None if body is None else orjson.dumps(dict(body))
        return await self._send(method, path, data, self._plain, accept)

    async def _send(
        self,
        method: str,
        path: str,
        data: bytes | aiohttp.FormData | None,
        limits: aiohttp.ClientTimeout,
        accept: tuple[int, ...] = (200,),
    ) -> Any:
        headers = {"content-type": "application/json"} if isinstance(data, bytes) else {}
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, timeout=limits
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._down(error) from error
        if response.status not in accept:
            raise _refused(response.status, raw)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise CliError(f"What answers at {self._url} is not a Headstart gateway.") from None

    def _down(self, error: Exception) -> CliError:
        if isinstance(error, aiohttp.ClientConnectorError):
            return GatewayDown(
                f"No gateway answers at {self._url}. Start it with 'headstart serve', or give --url or HEADSTART_URL."
            )
        if isinstance(error, TimeoutError):
            return CliError(f"The gateway at {self._url} did not answer in time.")
        return CliError(f"The connection to the gateway at {self._url} broke ({type(error).__name__}).")


def printable_name(name: str) -> str:
    return "".join(character for character in name if character.isprintable())


def _refused(status: int, raw: bytes) -> Refused:
    try:
        error = _object(_object(orjson.loads(raw)).get("error"))
    except orjson.JSONDecodeError:
        error = {}
    message = str(error.get("message") or f"Status {status}, not from a Headstart gateway. Is --url right?")
    if status == 401:
        message += " Give the key with --api-key or HEADSTART_API_KEY."
    return Refused(message, status=status)


def _delta(chunk: bytes) -> tuple[Delta | None, bool]:
    """(what the event adds, whether it ends the answer). Raises Refused for an error event."""
    try:
        event = _object(orjson.loads(chunk))
    except orjson.JSONDecodeError:
        raise CliError("The gateway sent an event that is not JSON.") from None
    if "error" in event:
        raise Refused(str(_object(event["error"]).get("message") or "The answer failed."), status=502)
    choices = event.get("choices") or []
    choice = _object(choices[0]) if choices else {}
    text = str(_object(choice.get("delta")).get("content") or "")
    extension = event.get("headstart")
    if not text and extension is None:
        return None, choice.get("finish_reason") is not None
    return Delta(text, extension), choice.get("finish_reason") is not None


def _store(entry: Any) -> Store:
    fields = _object(entry)
    counts = {name: int(number) for name, number in _object(fields.get("file_counts")).items()}
    return Store(
        id=str(fields.get("id", "")),
        name=str(fields.get("name") or ""),
        files=counts,
        usage_bytes=int(fields.get("usage_bytes") or 0),
    )


def _store_file(entry: Any) -> StoreFile:
    fields = _object(entry)
    return StoreFile(
        id=str(fields.get("id", "")),
        status=str(fields.get("status", "")),
        error=str(_object(fields.get("last_error")).get("message") or ""),
        attributes=_object(fields.get("attributes")),
        filename=str(fields.get("filename") or ""),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _part(text: str) -> str:
    return quote(text, safe="")
