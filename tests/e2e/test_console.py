"""The console in a real browser, on the whole gateway, with the simulated engine behind it."""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import uvicorn
from playwright.async_api import Browser, FilePayload, Page, async_playwright, expect

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import settings_for
from gateway.app import create_app
from gateway.settings import Settings

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

KEY = "hs-console-test"
BROWSER_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
FERRY = b"# Ferry\n\nThe last ferry to Pellen leaves at nineteen forty on weekdays.\n"
KITCHEN = "# Bếp chung\n\nBếp chung mở cửa lúc sáu giờ sáng.\n".encode()


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[str]:
    """The gateway on a free port, started; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(create_app(settings), lifespan="on", log_level="warning", timeout_graceful_shutdown=2)
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # It listens already, so this waits for the start: the embedding model loads for seconds.
        limit = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(f"{url}/healthz") as response:
            assert response.status == 200
        yield url
        server.should_exit = True
        await task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(time_scale=0.02, decode_tokens_per_s=2000)) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(engine: EngineSim, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("console")
    settings = settings_for(folder, engine.url)
    async with serving(settings) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium_path: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path, args=list(BROWSER_ARGS))
        yield browser
        await browser.close()


class Watched:
    """A page, and everything that it complained about or asked of others."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        page.on("request", lambda asked: None if asked.url.startswith(url) else self.foreign.append(asked.url))


@pytest_asyncio.fixture(loop_scope="module")
async def watched(browser: Browser, url: str) -> AsyncIterator[Watched]:
    context = await browser.new_context(viewport={"width": 1200, "height": 900})
    watched = Watched(await context.new_page(), url)
    await watched.page.goto(url)
    yield watched
    await context.close()


async def make_store(page: Page, name: str) -> None:
    await page.get_by_label("Name of a new store").fill(name)
    await page.get_by_role("button", name="Create").click()
    await expect(page.locator("#stores").get_by_role("button", name=name)).to_have_attribute("aria-pressed", "true")


async def add_files(page: Page, *files: tuple[str, bytes]) -> None:
    payloads: list[FilePayload] = [
        {"name": name, "mimeType": "text/markdown", "buffer": content} for name, content in files
    ]
    await page.locator("#upload").set_input_files(payloads)


async def ask(page: Page, question: str) -> None:
    await page.get_by_label("Question").fill(question)
    await page.get_by_label("Question").press("Enter")


async def test_a_document_becomes_an_answer_with_its_passage_and_its_times(watched: Watched) -> None:
    page = watched.page
    await expect(page.locator("#engine-line")).to_have_text("sim-model")
    await make_store(page, "handbook")
    await add_files(page, ("ferry.md", FERRY), ("bếp.md", KITCHEN))
    await expect(page.locator("#files .status.completed")).to_have_count(2, timeout=60_000)
    await ask(page, "When does the last ferry to Pellen leave?")
    turn = page.locator(".turn").first
    await expect(turn.locator(".answer")).to_have_attribute("aria-busy", "false")
    await expect(turn.locator(".answer")).to_contain_text("last ferry to Pellen")
    passages = turn.locator(".passages details")
    await expect(passages.filter(has_text="ferry.md")).to_contain_text("nineteen forty")
    await expect(turn.locator(".passages .named")).to_have_count(1)
    named = turn.locator(".passages details", has=page.locator(".named"))
    await named.evaluate("details => { details.open = false; }")
    await turn.locator(".cite").first.click()
    await expect(named).to_have_attribute("open", "")
    timing = turn.locator(".timing")
    for part in ("retrieve", "plan", "prefill", "decode"):
        await expect(timing.locator(f".bar .{part}")).to_have_count(1)
        await expect(timing).to_contain_text(part)
    await expect(timing).to_contain_text("prompt tokens")
    await expect(timing).to_contain_text("uncached")
    row = page.locator("#calls tr").first
    await expect(row).to_contain_text("200")
    await expect(row).to_contain_text("sim-model")
    assert (watched.complaints, watched.foreign) == ([], [])


async def test_a_second_question_goes_on_with_the_conversation(watched: Watched, engine: EngineSim) -> None:
    page = watched.page
    await ask(page, "What is a tide?")
    await expect(page.locator(".turn").nth(0).locator(".answer")).to_have_attribute("aria-busy", "false")
    await expect(page.locator("#send")).to_be_enabled()
    await ask(page, "And a current?")
    await expect(page.locator(".turn").nth(1).locator(".answer")).to_have_attribute("aria-busy", "false")
    await expect(page.locator("#send")).to_be_enabled()
    roles = [message["role"] for message in engine.generations[-1].body["messages"]]
    assert roles == ["user", "assistant", "user"]
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator(".turn")).to_have_count(0)


async def test_h9_hostile_file_names_are_shown_as_text(watched: Watched) -> None:
    page = watched.page
    names = {
        "<img src=x onerror=alert(1)>.md": "<img src=x onerror=alert(1)>.md",
        "<script>alert(2)</script>.md": "script>.md",
        "&lt;b&gt;.md": "&lt;b&gt;.md",
        "..": "file",
        "thực đơn 메뉴 เมนู قائمة.md": "thực đơn 메뉴 เมนู قائمة.md",
        "x" * 5000 + ".md": "x" * 252 + ".md",
    }
    await make_store(page, "<b>hostile</b>")
    await add_files(page, *((name, FERRY + name[:9].encode()) for name in names))
    await expect(page.locator("#files li")).to_have_count(len(names))
    await expect(page.locator("#uploads li")).to_have_count(0)
    shown = await page.locator("#files .name").all_text_contents()
    assert sorted(shown) == sorted(names.values())
    assert await page.locator("#files img, #files script, #files b, #stores b").count() == 0
    width = await page.locator(".side").evaluate("side => [side.scrollWidth, side.clientWidth]")
    assert width[0] <= width[1], "a long name widens the page"
    assert watched.complaints == []


async def test_a_document_with_markup_is_shown_as_text_in_its_passage(watched: Watched) -> None:
    page = watched.page
    await make_store(page, "markup")
    await add_files(page, ("m.txt", b"The anchor code is <img src=x onerror=alert(3)> and <b>seven</b>."))
    await expect(page.locator("#files .status.completed")).to_have_count(1, timeout=60_000)
    await ask(page, "What is the anchor code <i>today</i>?")
    await expect(page.locator(".turn .answer")).to_have_attribute("aria-busy", "false")
    await expect(page.locator(".passages p")).to_contain_text("<img src=x onerror=alert(3)>")
    assert await page.locator(".turn img, .turn b, .turn p i").count() == 0
    assert watched.complaints == []


async def test_e1_a_file_that_cannot_be_read_says_why(watched: Watched) -> None:
    page = watched.page
    await make_store(page, "failures")
    await add_files(page, ("empty.md", b""), ("blank.md", b"  \n"))
    await expect(page.locator("#uploads .why")).to_have_text("The file is empty.")
    await expect(page.locator("#files .status.failed")).to_have_count(1, timeout=60_000)
    await expect(page.locator("#files .why")).not_to_be_empty()


async def test_an_error_of_the_engine_is_shown_and_the_next_question_is_answered(
    watched: Watched, engine: EngineSim
) -> None:
    page = watched.page
    engine.set_fault(Fault("error_event", after_chunks=2))
    await ask(page, "first")
    await expect(page.locator(".turn .error")).to_be_visible()
    await ask(page, "second")
    await expect(page.locator(".turn").nth(1).locator(".answer")).to_contain_text("second")
    await expect(page.locator(".turn").nth(1).locator(".error")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_a_narrow_screen_in_both_schemes(browser: Browser, url: str, scheme: str) -> None:
    context = await browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)  # type: ignore[arg-type]
    page = await context.new_page()
    await page.goto(url)
    await expect(page.locator("#engine-line")).to_have_text("sim-model")
    overflow = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow == 0
    light = await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 243)"
    assert light == (scheme == "light")
    await context.close()


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, engine: EngineSim, tmp_path: Path) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    settings = settings_for(tmp_path, engine.url, api_keys=f"deck:{digest}")
    async with serving(settings) as url:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(url)
        await expect(page.locator("#key-form")).to_be_visible()
        await expect(page.locator("#main")).to_be_hidden()
        await page.locator("#key").fill("wrong")
        await page.locator("#key").press("Enter")
        await expect(page.locator("#key-hint")).to_have_text("That key is not known here.")
        await page.locator("#key").fill(KEY)
        await page.locator("#key").press("Enter")
        await expect(page.locator("#key-form")).to_be_hidden()
        await make_store(page, "mine")
        await page.reload()
        await expect(page.locator("#stores").get_by_role("button", name="mine")).to_be_visible()
        assert KEY not in await page.content()
        await context.close()
