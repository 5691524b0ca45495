import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.addresses import TrackedName, can_be_tracked, distinct, look_up
from gateway.discovery import Discovery
from gateway.endpoints import Endpoint
from gateway.settings import Settings

TWO = ("10.0.0.2", "10.0.0.1")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HEADSTART_{name.upper()}", raising=False)


Told = asyncio.Queue[tuple[Endpoint, ...]]


class Names:
    """A resolver whose answers are set by the test; a name without any cannot be resolved."""

    def __init__(self, **addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> tuple[str, ...]:
        self.asked.append((host, port))
        if host not in self.addresses:
            raise OSError("no such name")
        return self.addresses[host]


def discovery(engine_url: str, names: Names | None = None, **changes: Any) -> Discovery:
    return Discovery(Settings(engine_url=engine_url), look_up=names or Names(), **changes)


def hosts(endpoints: tuple[Endpoint, ...]) -> list[str]:
    return [endpoint.url for endpoint in endpoints]


async def test_each_address_of_a_name_is_an_engine_that_is_told_its_name() -> None:
    async with discovery("http://pods:8000/base", Names(pods=TWO)) as found:
        assert hosts(found.endpoints) == ["http://10.0.0.1:8000/base", "http://10.0.0.2:8000/base"]
        assert {endpoint.host for endpoint in found.endpoints} == {"pods:8000"}


async def test_h4_the_name_of_an_address_is_always_the_same_and_does_not_tell_it() -> None:
    async with (
        discovery("gpu=http://pods", Names(pods=TWO)) as one,
        discovery("gpu=http://pods", Names(pods=TWO[::-1])) as other,
    ):
        assert one.endpoints == other.endpoints
        for endpoint in one.endpoints:
            assert endpoint.name.startswith("gpu-")
            assert ".0.0." not in endpoint.name
        assert len({endpoint.name for endpoint in one.endpoints}) == 2


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "https://pods", "http://a.localhost"]
)
async def test_addresses_localhost_and_https_stay_as_they_are_named(url: str) -> None:
    names = Names(pods=TWO, localhost=TWO)
    async with discovery(url, names) as found:
        assert found.endpoints == (Endpoint("engine", url),)
        assert not names.asked


async def test_a_name_of_one_address_is_dialled_by_its_name() -> None:
    async with discovery("http://pod:8000", Names(pod=("10.0.0.1",))) as found:
        assert found.endpoints == (Endpoint("engine", "http://pod:8000"),)


async def test_engines_that_come_and_go_are_told_in_the_order_of_their_addresses() -> None:
    names = Names(pods=("10.0.0.9", "10.0.0.10"))
    told = Told()
    async with discovery("http://pods", names) as found:
        found.on_change(told.put)
        await found.refresh()
        assert told.empty()
        names.addresses["pods"] = ("10.0.0.10", "10.0.0.2", "10.0.0.9")
        await found.refresh()
        three = told.get_nowait()
        assert hosts(three) == ["http://10.0.0.2", "http://10.0.0.9", "http://10.0.0.10"]
        names.addresses["pods"] = ("10.0.0.2",)
        await found.refresh()
        assert told.empty(), "an address that one look-up lacks is not gone yet"
        await found.refresh()
        one = told.get_nowait()
        assert hosts(one) == ["http://10.0.0.2"]
        assert one[0] in three, "the one that is left is the engine that it was"
        assert found.endpoints == one


async def test_a_failing_look_up_keeps_the_last_addresses_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(pods=TWO)
    told = Told()
    async with discovery("http://pods", names) as found:
        found.on_change(told.put)
        before = found.endpoints
        del names.addresses["pods"]
        for _ in range(4):
            await found.refresh()
        assert found.endpoints == before
        assert told.empty()
        assert caplog.text.count("cannot be resolved") == 1
        names.addresses["pods"] = ()
        await found.refresh()
        assert found.endpoints == before


async def test_a_name_that_is_unknown_at_the_start_is_an_engine_as_it_is_named() -> None:
    names = Names()
    async with discovery("http://pods", names) as found:
        assert found.endpoints == (Endpoint("engine", "http://pods"),)
        names.addresses["pods"] = TWO
        await found.refresh()
        assert len(found.endpoints) == 2


async def test_names_are_looked_up_again_by_themselves() -> None:
    names = Names(pods=TWO)
    settings = Settings(engine_url="http://pods", dns_refresh_s=0.01)
    async with Discovery(settings, look_up=names) as found:
        told = Told()
        found.on_change(told.put)
        names.addresses["pods"] = (*TWO, "10.0.0.3")
        async with asyncio.timeout(5):
            assert len(await told.get()) == 3


async def test_a_follower_that_fails_does_not_end_the_looking(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(pods=TWO)
    async with Discovery(Settings(engine_url="http://pods", dns_refresh_s=0.01), look_up=names) as found:
        times = asyncio.Semaphore(0)

        async def fail(endpoints: tuple[Endpoint, ...]) -> None:
            times.release()
            raise RuntimeError("planted")

        found.on_change(fail)
        async with asyncio.timeout(5):
            for last in (3, 4):
                names.addresses["pods"] = (*TWO, f"10.0.0.{last}")
                await times.acquire()
    assert "looking for the engines failed" in caplog.text


def test_of_a_name_with_both_families_the_engines_are_counted_once() -> None:
    name = TrackedName(Endpoint("e", "http://pods:8000"))
    name.seen(("fd00::2", "10.0.0.1", "fd00::1"))
    assert name.endpoints() == (Endpoint("e", "http://pods:8000"),)


def test_ipv6_addresses_stand_in_brackets_and_in_one_form() -> None:
    name = TrackedName(Endpoint("e", "http://pods:8000"))
    name.seen(("fd00::0:2", "FD00::1", "fe80::1%eth0"))
    assert hosts(name.endpoints()) == ["http://[fd00::1]:8000", "http://[fd00::2]:8000"]
    assert all(set(endpoint.name) <= set("e-0123456789abcdef") for endpoint in name.endpoints())


def test_a_single_engine_that_moves_is_not_two() -> None:
    name = TrackedName(Endpoint("e", "http://pod"))
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        name.seen((address,))
        assert name.endpoints() == (Endpoint("e", "http://pod"),)


def test_one_place_under_two_names_is_one_engine_and_equal_names_are_told_apart() -> None:
    places = [
        Endpoint("a", "http://x"),
        Endpoint("b", "http://x"),
        Endpoint("a", "http://y"),
        Endpoint("a", "http://z"),
    ]
    assert distinct(places) == (Endpoint("a", "http://x"), Endpoint("a-2", "http://y"), Endpoint("a-3", "http://z"))


async def test_the_system_resolves_a_numeric_name_without_a_network() -> None:
    assert await look_up("127.0.0.1", 80) == ("127.0.0.1",)
    assert not can_be_tracked(Endpoint("e", "http://127.0.0.1"))


@asynccontextmanager
async def reloading(**changes: Any) -> AsyncIterator[tuple[Discovery, Told]]:
    """Engines of headstart.toml, read again by hand or at a signal."""
    told = Told()
    async with Discovery(Settings(), reread=Settings, look_up=Names(), **{"file_poll_s": 3600.0, **changes}) as found:
        found.on_change(told.put)
        yield found, told


def write(engine_url: str, more: str = "") -> None:
    write_text(f'engine_url = "{engine_url}"\n{more}')


def write_text(text: str) -> None:
    Path("headstart.toml").write_text(text)


def unlink() -> None:
    Path("headstart.toml").unlink()


def replace_with_a_folder() -> None:
    unlink()
    Path("headstart.toml").mkdir()


async def test_a_reload_adds_and_removes_engines() -> None:
    write("http://127.0.0.1:1,http://127.0.0.1:2")
    async with reloading() as (found, told):
        write("http://127.0.0.1:2,http://127.0.0.1:3")
        await found.reload()
        assert hosts(told.get_nowait()) == ["http://127.0.0.1:2", "http://127.0.0.1:3"]
        await found.reload()
        assert told.empty()


async def test_sighup_reads_the_file_again() -> None:
    write("http://127.0.0.1:1")
    async with reloading() as (_, told):
        write("http://127.0.0.1:2")
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(5):
            assert hosts(await told.get()) == ["http://127.0.0.1:2"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_a_file_that_changes_is_read_again_without_a_signal() -> None:
    async with reloading(file_poll_s=0.01) as (found, told):
        assert hosts(found.endpoints) == ["http://127.0.0.1:8000"]
        write("http://127.0.0.1:2")
        async with asyncio.timeout(5):
            assert hosts(await told.get()) == ["http://127.0.0.1:2"]
            unlink()
            assert hosts(await told.get()) == ["http://127.0.0.1:8000"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('engine_url = "ftp://planted"', "engine_url: Value error, must begin with http://"),
        ('engine_url = "http://me:planted@host"', "engine_url: Value error, takes no user"),
        ('engine_url = "http://planted,http://planted"', "engine_url: Value error, holds a URL twice"),
        ('top_k = "planted"', "top_k: "),
        ("top_k = ", "Invalid value"),
    ],
)
async def test_h4_a_file_that_is_wrong_changes_nothing_and_says_why_without_its_values(
    text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write("http://127.0.0.1:1")
    async with reloading() as (found, told):
        write_text(text)
        await found.reload()
        assert told.empty()
        assert hosts(found.endpoints) == ["http://127.0.0.1:1"]
    assert reason in caplog.text
    assert "planted" not in caplog.text


@pytest.mark.parametrize("text", ["", "top_k = 5\n", None])
async def test_a_file_that_is_emptied_or_gone_takes_no_engine_away(
    text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write("http://127.0.0.1:1")
    async with reloading() as (found, told):
        if text is None:
            replace_with_a_folder()
        else:
            write_text(text)
        await found.reload()
        assert told.empty()
        assert hosts(found.endpoints) == ["http://127.0.0.1:1"]
    assert "engine_url is not set any more" in caplog.text


async def test_a_file_that_nests_too_deep_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    write("http://127.0.0.1:1")
    async with reloading() as (found, _):
        write_text("x = " + "[" * 100_000)
        await found.reload()
        assert hosts(found.endpoints) == ["http://127.0.0.1:1"]
    assert "nests too deep" in caplog.text
    assert "Traceback" not in caplog.text


async def test_engines_that_could_not_be_taken_are_told_again() -> None:
    write("http://127.0.0.1:1")
    told = []

    async def fails_once(endpoints: tuple[Endpoint, ...]) -> None:
        told.append(hosts(endpoints))
        if len(told) == 1:
            raise RuntimeError("no")

    async with reloading() as (found, _):
        found.on_change(fails_once)
        write("http://127.0.0.1:2")
        with pytest.raises(RuntimeError):
            await found.reload()
        await found.refresh()
        await found.refresh()
    assert told == [["http://127.0.0.1:2"]] * 2


async def test_settings_that_need_a_restart_are_named_and_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    write("http://127.0.0.1:1", 'top_k = 5\nengine_api_key = "a"\n')
    async with reloading() as (found, told):
        write("http://127.0.0.1:2", 'top_k = 7\nengine_api_key = "planted"\n')
        await found.reload()
        assert hosts(told.get_nowait()) == ["http://127.0.0.1:2"]
    assert "a restart is needed for: engine_api_key, top_k" in caplog.text
    assert "planted" not in caplog.text


async def test_a_variable_wins_over_the_file_at_a_reload_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_ENGINE_URL", "http://127.0.0.1:9")
    async with reloading() as (found, told):
        write("http://127.0.0.1:2")
        await found.reload()
        assert told.empty()
        assert hosts(found.endpoints) == ["http://127.0.0.1:9"]


async def test_which_engine_is_which_is_logged_when_there_are_several_with_ports_only_where_hosts_are_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with discovery("a=http://10.0.0.1:7001,b=http://10.0.0.1:7002,c=http://10.0.0.2:7001"):
        assert "3 engines: a at 10.0.0.1:7001, b at 10.0.0.1:7002, c at 10.0.0.2" in caplog.text
    async with discovery("a=http://10.0.0.1:8123,b=http://10.0.0.2:8123"):
        assert "2 engines: a at 10.0.0.1, b at 10.0.0.2" in caplog.text
        assert "8123" not in caplog.text


async def test_one_engine_is_not_told_by_its_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with discovery("http://10.0.0.1:8123"):
        assert "10.0.0.1" not in caplog.text
