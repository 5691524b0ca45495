"""Where engines are: the setting `engine_url`, read into one named endpoint for each."""

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

ONLY_NAME = "engine"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine's address, and the name that answers, metrics and logs call it by.

    `url` is the base without `/v1` and without a slash at its end. Where a name was resolved it holds the IP address,
    and `host` the Host header to send; otherwise `host` is empty.
    """

    name: str
    url: str
    host: str = ""


def parse_endpoints(engine_url: str) -> tuple[Endpoint, ...]:
    """One URL or several, separated by commas, each optionally `NAME=URL`, in the order given.

    One URL without a name is `engine`; of several, those without are `engine-1`, `engine-2`, ... by their place.
    Raises ValueError for what is no base URL of an engine and for a name or URL that stands there twice. The message
    never repeats any of the value: it may hold a secret.
    """
    items = [item.strip() for item in engine_url.split(",")]
    endpoints = tuple(_endpoint(item, place, len(items)) for place, item in enumerate(items, start=1))
    for what, values in (
        ("name", [endpoint.name for endpoint in endpoints]),
        ("URL", [endpoint.url for endpoint in endpoints]),
    ):
        if len(set(values)) < len(values):
            raise ValueError(f"holds a {what} twice")
    return endpoints


def _endpoint(item: str, place: int, count: int) -> Endpoint:
    named, _, _ = item.partition("://")
    if "=" in named:
        name, _, url = item.partition("=")
        if _NAME.fullmatch(name) is None:
            raise ValueError("takes names of 1 to 64 letters, digits, dots, hyphens and underscores, as NAME=URL")
    else:
        name, url = (ONLY_NAME if count == 1 else f"{ONLY_NAME}-{place}"), item
    return Endpoint(name, _base(url))


def _base(url: str) -> str:
    """The one form in which equal addresses are equal: lower case, no default port, no `/v1`, no slash at the end."""
    parts = _split(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("takes no user, query or fragment; give a key with engine_api_key")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{authority(parts.hostname, _port(parts), parts.scheme)}{path}"


def authority(host: str, port: int | None, scheme: str) -> str:
    """`host:port` as URLs and Host headers hold it: IPv6 in brackets, no port that the scheme implies."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None or port == _DEFAULT_PORTS[scheme] else f"{shown}:{port}"


def _split(url: str) -> SplitResult:
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ValueError("holds a blank or a control character")
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL") from None


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        raise ValueError("names a port that is not a number from 0 to 65535") from None
