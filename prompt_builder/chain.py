"""Keys of conversations: a hash chain over what was said, begun with whose conversation it is."""

from collections.abc import Sequence
from hashlib import blake2b

from prompt_builder.types import PastMessage


def chain(tenant: str, user: str | None, model: str, past: Sequence[PastMessage]) -> list[str]:
    """One link for each message, hexadecimal: of everything up to and including it."""
    link = _digest(b"", tenant, _user(user), model)
    links = []
    for message in past:
        # Clients trim answers before they resend them.
        link = _digest(link, message.role, message.content.strip())
        links.append(link.hex())
    return links


def link_of(tenant: str, user: str | None, model: str, past: Sequence[PastMessage]) -> str:
    """What stands for these messages, in this order, of this user. Raises IndexError for none."""
    return chain(tenant, user, model, past)[-1]


def _digest(parent: bytes, *parts: str) -> bytes:
    """Lengths go in with the parts, so that no two lists of parts read the same."""
    digest = blake2b(parent, digest_size=20)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def conversation_key(tenant: str, user: str | None, conversation: str) -> str:
    return f"conversation:{_digest(b'', tenant, _user(user), conversation).hex()}"


def _user(user: str | None) -> str:
    """No user and a user without a name are two."""
    return "" if user is None else f"={user}"
