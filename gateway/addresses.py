"""A name that stands for several engines: its addresses, followed as they come and go, and an endpoint for each."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from hashlib import blake2b
from urllib.parse import urlsplit

from gateway.endpoints import Endpoint, authority

LEAVES_AFTER = 2
"""Look-ups in a row that an address is missing from before it counts as gone: some servers tell a part at a time."""


async def look_up(host: str, port: int) -> tuple[str, ...]:
    """The IP addresses of a name, as the system resolves it. Raises OSError or UnicodeError when it does not."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(str(item[4][0]) for item in found)


def can_be_tracked(endpoint: Endpoint) -> bool:
    """Whether its host is a name that may stand for several engines.

    Behind https it may not: certificates are for names. `localhost` is one machine, whatever addresses it has.
    """
    parts = urlsplit(endpoint.url)
    host = parts.hostname or ""
    if parts.scheme != "http" or host == "localhost" or host.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def distinct(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """Each place once, the first that names it; names that meet are told apart by a number."""
    kept: dict[tuple[str, str], Endpoint] = {}
    names: set[str] = set()
    for endpoint in endpoints:
        place = (endpoint.url, endpoint.host)
        if place in kept:
            continue
        name, number = endpoint.name, 2
        while name in names:
            name, number = f"{endpoint.name}-{number}", number + 1
        names.add(name)
        kept[place] = endpoint if name == endpoint.name else Endpoint(name, *place)
    return tuple(kept.values())


class TrackedName:
    """What the look-ups of one endpoint's name say, one after the other. Bounded by what the last ones held.

    A name of one address stays as it is, so that its own name is dialled; once it had several, each address is an
    engine of its own, also when one is left. Of a name with IPv4 and IPv6 addresses only the former count: the same
    engines have both.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._missing: dict[str, int] = {}
        self._several = False

    def seen(self, addresses: Iterable[str]) -> None:
        """The outcome of a look-up; one without addresses changes nothing."""
        found = set(_of_one_family(addresses))
        if not found:
            return
        missing = {address: count + 1 for address, count in self._missing.items() if address not in found}
        stay = {address: count for address, count in missing.items() if count < LEAVES_AFTER}
        if not self._several and len(found) == 1:
            # It moved, as a single engine does: nobody waits for the old address.
            stay = {}
        self._missing = stay | dict.fromkeys(found, 0)
        self._several = self._several or len(found) > 1

    def endpoints(self) -> tuple[Endpoint, ...]:
        """In the order of the addresses, whatever order they were told in."""
        if not self._several:
            return (self._endpoint,)
        addresses = sorted(map(ipaddress.ip_address, self._missing), key=lambda each: (each.version, each.packed))
        return tuple(at_address(self._endpoint, str(address)) for address in addresses)


def at_address(endpoint: Endpoint, address: str) -> Endpoint:
    """The endpoint at one of its name's addresses.

    Its own name ends in a digest of the address: the same in every gateway, and no answer tells the address.
    """
    parts = urlsplit(endpoint.url)
    port = parts.port
    digest = blake2b(address.encode(), digest_size=3).hexdigest()
    return Endpoint(
        name=f"{endpoint.name}-{digest}",
        url=f"{parts.scheme}://{authority(address, port, parts.scheme)}{parts.path}",
        host=authority(parts.hostname or "", port, parts.scheme),
    )


def _of_one_family(addresses: Iterable[str]) -> list[str]:
    """IPv4 where there is any, in canonical form; link-local addresses are none that a URL can hold."""
    parsed = [ipaddress.ip_address(address) for address in addresses if "%" not in address]
    version = min((address.version for address in parsed), default=4)
    return [str(address) for address in parsed if address.version == version]
