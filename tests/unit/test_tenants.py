"""Who a key belongs to, and the secret behind the cache salts."""

from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.tenants import KeyFileError, key_digest, load_salt_secret, load_tenants


def test_a_key_names_its_tenant_and_only_its_hash_is_configured() -> None:
    tenants = load_tenants(f"ada:{key_digest('k1')},bob:{key_digest('k2')}", None, b"secret")
    assert tenants.authenticate(b"Bearer k2") == "bob"
    with pytest.raises(ApiError, match="Unknown API key"):
        tenants.authenticate(b"Bearer k3")


def test_salts_of_tenants_differ_are_stable_and_name_nobody() -> None:
    tenants = load_tenants("", None, b"secret")
    ada, bob = tenants.cache_salt("ada"), tenants.cache_salt("bob")
    assert ada != bob
    assert ada == load_tenants("", None, b"secret").cache_salt("ada")
    assert ada != load_tenants("", None, b"other").cache_salt("ada")
    assert len(bytes.fromhex(ada)) == 32


def test_a_file_without_keys_is_refused_because_everybody_could_call(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(KeyFileError, match="holds no key"):
        load_tenants("", file, b"")


def test_the_secret_of_the_salts_is_made_once_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    first = load_salt_secret(tmp_path / "data", "")
    assert len(first) == 64
    assert load_salt_secret(tmp_path / "data", "") == first
    assert (tmp_path / "data" / "salt-secret").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["salt-secret"]


def test_a_secret_that_was_emptied_is_refused_and_never_used(tmp_path: Path) -> None:
    (tmp_path / "salt-secret").touch()
    with pytest.raises(OSError, match="is empty"):
        load_salt_secret(tmp_path, "")
