import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from gateway.cli.terminal import CliError, load_settings
from gateway.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text("utf-8")
UNITS = {"_s": "second", "_ms": "millisecond", "_bytes": "byte", "_tokens": "token"}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HEADSTART_{name.upper()}", raising=False)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented_with_type_unit_and_default(name: str) -> None:
    found = re.search(rf"^\| `HEADSTART_{name.upper()}` \| (.+?) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
    assert found, f"docs/settings.md has no row for HEADSTART_{name.upper()}"
    kind, default, meaning = found.groups()
    assert re.match(r"text|whole number|number|true or false|path|`", kind)
    field = Settings.model_fields[name]
    if field.default not in ("", None, PydanticUndefined):
        shown = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert default == f"`{shown}`"
    assert meaning == field.description
    unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), None)
    assert unit is None or unit in meaning.lower()


def test_no_setting_is_documented_that_does_not_exist() -> None:
    documented = re.findall(r"^\| `HEADSTART_(\w+)`", PAGE, re.MULTILINE)
    assert sorted(documented) == sorted(name.upper() for name in Settings.model_fields)


def test_a_variable_wins_over_the_file_and_the_file_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("headstart.toml").write_text("top_k = 7\nport = 9000\n")
    monkeypatch.setenv("HEADSTART_PORT", "9001")
    settings = load_settings(host="127.0.0.2")
    assert (settings.top_k, settings.port, settings.host) == (7, 9001, "127.0.0.2")
    assert settings.chunk_tokens == 256
    assert load_settings(port=9002).port == 9002


def test_an_unknown_key_of_the_file_is_refused_by_its_name() -> None:
    Path("headstart.toml").write_text("top_k = 7\ntopk = 8\n")
    with pytest.raises(CliError, match="topk: there is no such setting") as caught:
        load_settings()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["top_k = ", "[[", "\xff"])
def test_a_file_that_is_no_toml_is_told_in_one_line(text: str) -> None:
    Path("headstart.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(CliError, match="Settings cannot be read") as caught:
        load_settings()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "70000"), ("top_k", "0"), ("index", "tree"), ("log_level", "loud"), ("probe_interval_s", "0")],
)
def test_a_wrong_value_is_refused_by_the_settings_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HEADSTART_{name.upper()}", value)
    with pytest.raises(CliError, match=f"{name}: "):
        load_settings()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engine:8000",
        "ftp://engine",
        "file:///etc/passwd",
        "http://",
        "http://me:planted@engine",
        "http://engine/?planted=1",
        "http://engine/#planted",
    ],
)
def test_h2_h4_an_engine_url_that_is_none_or_holds_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(CliError, match="engine_url: ") as caught:
        load_settings(engine_url=url)
    assert "planted" not in str(caught.value)
    with pytest.raises(ValidationError) as raw:
        Settings(engine_url=url)
    assert "planted" not in str(raw.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://engine.example/base/", "http://[::1]:8000"])
def test_an_engine_url_may_have_a_path(url: str) -> None:
    assert load_settings(engine_url=url).engine_url == url


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load_settings().port = 1  # type: ignore[misc]
