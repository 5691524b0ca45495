"""API keys name tenants; a tenant's cache salt keeps its prefix cache apart from the others'."""

import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.errors import ApiError, ErrorKind

SINGLE_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY_BYTES_LIMIT = 512


class KeyFileError(ValueError):
    """A line of the key file, or an entry of `api_keys`, is not `TENANT SHA256_HEX`."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """Who may call. `tenants_by_digest` maps the SHA-256 of a key to its tenant; empty means no keys.

    `one_salt`: tenants share the engine's prefix cache.
    """

    tenants_by_digest: Mapping[bytes, str]
    salt_secret: bytes
    one_salt: bool = False

    @property
    def keyless(self) -> bool:
        return not self.tenants_by_digest

    def authenticate(self, authorization: bytes | None) -> str:
        """The tenant of an `Authorization` header.

        Only a digest of the presented key is compared, so neither its length nor its bytes cost time.
        Raises ApiError (401) for a missing, malformed or unknown key.
        """
        if self.keyless:
            return SINGLE_TENANT
        if authorization is None:
            raise unauthenticated("No API key. Send it as 'Authorization: Bearer KEY'.")
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key or len(key) > _KEY_BYTES_LIMIT:
            raise unauthenticated("The Authorization header must be 'Bearer KEY'.")
        tenant = self.tenants_by_digest.get(hashlib.sha256(key).digest())
        if tenant is None:
            raise unauthenticated("Unknown API key.")
        return tenant

    def cache_salt(self, tenant: str) -> str:
        """HMAC-SHA256 of the tenant's name, in hex: fits the engine's 128 characters, reveals no name."""
        if self.one_salt:
            tenant = SINGLE_TENANT
        return hmac.new(self.salt_secret, tenant.encode(), hashlib.sha256).hexdigest()


def unauthenticated(message: str) -> ApiError:
    return ApiError(ErrorKind.UNAUTHENTICATED, message, code="invalid_api_key")


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A key of 256 random bits."""
    return f"hs-{secrets.token_urlsafe(32)}"


def load_tenants(api_keys: str, api_keys_file: Path | None, salt_secret: bytes, *, one_salt: bool = False) -> Tenants:
    """Reads `TENANT:SHA256_HEX,…` and the file's `TENANT SHA256_HEX` lines. Raises KeyFileError."""
    entries = [(entry, "api_keys") for entry in api_keys.split(",") if entry.strip()]
    if api_keys_file is not None:
        try:
            lines = api_keys_file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"The key file {api_keys_file} cannot be read: {error}") from error
        entries += [(line, str(api_keys_file)) for line in lines if line.strip() and not line.startswith("#")]
    if not entries and (api_keys or api_keys_file is not None):
        raise KeyFileError(
            f"{api_keys_file or 'api_keys'} holds no key, and without keys everybody could call. Make one with "
            "'headstart key TENANT', or remove the setting."
        )
    return Tenants(_parse(entries), salt_secret, one_salt)


def _parse(entries: Iterable[tuple[str, str]]) -> dict[bytes, str]:
    tenants: dict[bytes, str] = {}
    for number, (entry, source) in enumerate(entries, 1):
        tenant, _, digest = entry.strip().replace(":", " ", 1).partition(" ")
        digest = digest.strip().lower()
        if not _TENANT.fullmatch(tenant) or not _SHA256.fullmatch(digest):
            raise KeyFileError(
                f"Entry {number} of {source} is not 'TENANT SHA256_HEX' (make one with 'headstart key TENANT')."
            )
        if tenants.setdefault(bytes.fromhex(digest), tenant) != tenant:
            raise KeyFileError(f"Entry {number} of {source} gives the key of another tenant to {tenant}.")
    return tenants


def load_salt_secret(data_dir: Path, configured: str) -> bytes:
    """The configured secret, or the one kept in the data folder, made on the first start. Raises OSError."""
    if configured:
        return configured.encode()
    path = data_dir / "salt-secret"
    data_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Whole or not at all: a crash must not leave a secret that is empty or cut. A name of its own, because
        # another gateway may start on the same folder at the same moment.
        descriptor, partial = tempfile.mkstemp(prefix="salt-secret.", dir=data_dir)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    secret = path.read_bytes()
    if not secret:
        raise OSError(f"{path} is empty. Restore it, or delete it: the engine's prefix cache then starts anew.")
    return secret
