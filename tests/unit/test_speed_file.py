"""Kept speeds: what is read back, and what is refused with which reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.backends.facts import EngineFacts
from gateway.speed_file import FILES_KEPT, SpeedFiles, SpeedKey, UnusableSpeed, key_of

FACTS = EngineFacts(
    reachable=True, model="m", models=("m",), root="/models/m", version="0.32.0", block_size=16, num_blocks=1000
)
URL = "http://127.0.0.1:8000"


def key(**changes: object) -> SpeedKey:
    found = key_of(FACTS, URL, "desk")
    assert found is not None
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> SpeedFiles:
    return SpeedFiles(tmp_path)


def test_what_was_written_is_read_under_the_same_key_only(files: SpeedFiles) -> None:
    assert files.read(key()) is None
    files.write(key(), b"state")
    assert files.read(key()) == b"state"
    assert files.read(key(engine_url="http://127.0.0.1:9000")) is None


def test_two_models_of_one_engine_are_kept_beside_each_other(files: SpeedFiles) -> None:
    files.write(key(), b"one")
    files.write(key(model="n", root="/models/n"), b"other")
    assert (files.read(key()), files.read(key(model="n", root="/models/n"))) == (b"one", b"other")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": "laptop"}, "another machine"),
        ({"model": "n"}, "another model"),
        ({"root": "/elsewhere"}, "another model folder"),
        ({"version": "0.33.0"}, "another version"),
        ({"block_size": 32}, "another block size"),
        ({"num_blocks": 2000}, "1,000 KV blocks then and has 2,000 now"),
    ],
)
def test_a_speed_of_something_else_at_this_address_is_refused_with_the_reason(
    files: SpeedFiles, changes: dict[str, object], reason: str
) -> None:
    files.write(key(), b"state")
    with pytest.raises(UnusableSpeed, match=reason):
        files.read(key(**changes))


def test_a_few_blocks_more_or_less_are_the_same_card(files: SpeedFiles) -> None:
    files.write(key(), b"state")
    assert files.read(key(num_blocks=1050)) == b"state"


@pytest.mark.parametrize("kept_bytes", [0, 1, 40, -1, -40])
def test_a_truncated_file_is_refused(files: SpeedFiles, tmp_path: Path, kept_bytes: int) -> None:
    files.write(key(), b"a state of some length, so that there is something to cut off")
    path = tmp_path / key().file_name()
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(UnusableSpeed, match="truncated"):
        files.read(key())


@pytest.mark.parametrize("raw", [b"[1, 2]\n", b'{"format": "photo"}\n', b"\x00\xff\xfe\n", b"null\nnull"])
def test_a_file_that_is_not_ours_is_refused(files: SpeedFiles, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / key().file_name()).write_bytes(raw)
    with pytest.raises(UnusableSpeed, match="no file of this program"):
        files.read(key())


def test_a_file_of_a_later_format_is_refused(files: SpeedFiles, tmp_path: Path) -> None:
    files.write(key(), b"state")
    path = tmp_path / key().file_name()
    path.write_bytes(path.read_bytes().replace(b'"version":1,"key"', b'"version":2,"key"'))
    with pytest.raises(UnusableSpeed, match="format 2, this program reads 1"):
        files.read(key())


def test_a_file_under_anothers_name_is_refused(files: SpeedFiles, tmp_path: Path) -> None:
    files.write(key(), b"state")
    other = key(machine="laptop")
    (tmp_path / key().file_name()).rename(tmp_path / other.file_name())
    with pytest.raises(UnusableSpeed, match="another machine"):
        files.read(other)


def test_a_reason_never_holds_an_address(files: SpeedFiles, tmp_path: Path) -> None:
    files.write(key(), b"state")
    other = key(engine_url="http://secret.example:1")
    (tmp_path / key().file_name()).rename(tmp_path / other.file_name())
    with pytest.raises(UnusableSpeed) as refused:
        files.read(other)
    assert "http" not in str(refused.value)


def test_a_folder_in_place_of_the_file_is_refused(files: SpeedFiles, tmp_path: Path) -> None:
    (tmp_path / key().file_name()).mkdir()
    with pytest.raises(UnusableSpeed, match="cannot be read"):
        files.read(key())


def test_a_link_to_itself_in_place_of_the_file_is_refused(files: SpeedFiles, tmp_path: Path) -> None:
    (tmp_path / key().file_name()).symlink_to(tmp_path / key().file_name())
    with pytest.raises(UnusableSpeed, match="cannot be read"):
        files.read(key())


def test_the_folder_keeps_a_bounded_number_of_files_and_no_half_written_ones(
    files: SpeedFiles, tmp_path: Path
) -> None:
    for number in range(FILES_KEPT + 5):
        files.write(key(model=f"m{number}"), b"state")
    assert len(list(tmp_path.iterdir())) == FILES_KEPT
    assert files.read(key(model=f"m{FILES_KEPT + 4}")) == b"state"
