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


def test_f5_where_it_is_configured_tenants_share_the_prefix_cache_and_nothing_else() -> None:
    tenants = load_tenants(f"ada:{key_digest('k1')},bob:{key_digest('k2')}", None, b"secret", one_salt=True)
    assert tenants.cache_salt("ada") == tenants.cache_salt("bob")
    assert tenants.authenticate(b"Bearer k1") != tenants.authenticate(b"Bearer k2")


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


@pytest.mark.parametrize(
    "entry",
    [
        "acme",
        "acme:",
        "acme:abc",
        f"acme:{'g' * 64}",
        f":{'a' * 64}",
        f"a/b:{'a' * 64}",
        f"{'t' * 65}:{'a' * 64}",
        f"é:{'a' * 64}",
    ],
)
def test_an_entry_that_is_none_is_refused_by_its_number_and_not_repeated(entry: str) -> None:
    with pytest.raises(KeyFileError, match=r"Entry 2 of api_keys is not 'TENANT SHA256_HEX'") as caught:
        load_tenants(f"good:{key_digest('k')},{entry}", None, b"")
    assert "a" * 64 not in str(caught.value)


def test_one_key_cannot_name_two_tenants() -> None:
    twice = f"ada:{key_digest('k')},bob:{key_digest('k')}"
    with pytest.raises(KeyFileError, match="Entry 2"):
        load_tenants(twice, None, b"")
    again = load_tenants(f"ada:{key_digest('k')},ada:{key_digest('k')}", None, b"")
    assert again.authenticate(b"Bearer k") == "ada"


def test_a_tenant_may_have_several_keys_from_both_places(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys of June\n\nada {key_digest('k2').upper()}\n")
    tenants = load_tenants(f" ada:{key_digest('k1')} , ", file, b"")
    assert [tenants.authenticate(f"Bearer {key}".encode()) for key in ("k1", "k2")] == ["ada", "ada"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"The key file .*keys cannot be read"):
        load_tenants("", file, b"")


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"k",
        b"Basic k",
        b"Bearer k k",
        b"Bearer k\x00",
        b"Bearer " + b"k" * 2**20,
        b"Bearer \xff",
    ],
)
def test_h3_a_hostile_authorization_header_is_a_401(header: bytes | None) -> None:
    tenants = load_tenants(f"ada:{key_digest('k')}", None, b"")
    with pytest.raises(ApiError) as caught:
        tenants.authenticate(header)
    assert caught.value.http_status == 401
    assert tenants.authenticate(b"bEaReR  k ") == "ada"


def test_h3_the_digest_of_a_key_is_no_key() -> None:
    tenants = load_tenants(f"ada:{key_digest('k')}", None, b"")
    with pytest.raises(ApiError):
        tenants.authenticate(f"Bearer {key_digest('k')}".encode())


def test_f5_salts_are_hex_and_short_enough_for_the_engine() -> None:
    tenants = load_tenants("", None, b"secret")
    for name in ("a", "t" * 64, "Acme.Corp-1_x"):
        assert len(tenants.cache_salt(name)) == 64
        assert name not in tenants.cache_salt(name) or name == "a"
