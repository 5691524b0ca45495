"""The report of a sweep in a real browser, from a file, without any network."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from gateway.tuning.grid import Setting, variants
from gateway.tuning.journal import Measurement
from gateway.tuning.recommend import Wishes, recommend, recommend_variant
from gateway.tuning.report import report_html
from gateway.tuning.results import Results
from gateway.tuning.statistics import summarise

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

BROWSER_ARGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
HOSTILE = 'a</script><script>document.title="taken"</script><b>&'
MOST_BYTES = 6_000_000


def measured(settings: list[Setting], questions: int) -> dict[tuple[str, int], Measurement]:
    return {
        (setting.name, place): Measurement(
            setting.name,
            place,
            total_ms=900.0 + place,
            ttft_ms=80.0 * setting.top_k + place,
            prompt_tokens=200 * setting.top_k,
            cached_tokens=32,
            chunks=setting.top_k,
            recall=float(place % 10 < 8 + min(setting.top_k, 2)),
            words=float((place + len(setting.name)) % 3 == 0),
        )
        for setting in settings
        for place in range(questions)
    }


def made(store: str, *, known: bool = True) -> Results:
    grid = [Setting(k, budget) for budget in (None, 300.0) for k in (1, 3, 8)]
    tried = list(variants(grid[1], ["chunk_order"]))
    done = measured([*grid, *tried], 40)
    if not known:
        done = {key: Measurement(each.setting, each.question, 9.0, ttft_ms=5.0) for key, each in done.items()}
    ttfts = {name: sorted(each.ttft_ms or 0 for (of, _), each in done.items() if of == name) for name, _ in done}
    return Results(
        store=store,
        model="model",
        asked=40,
        max_tokens=48,
        measured=len(done),
        expected=len(done),
        interrupted=False,
        grid=summarise(grid, done),
        variants=summarise(tried, done),
        recommendation=recommend(grid, done, Wishes()),
        variant=recommend_variant(tried[0], tried[1:], done),
        ttfts_ms=ttfts,
        notes=("One question at a time.", f"Missing: {store}"),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium_path: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path, args=list(BROWSER_ARGS))
        yield browser
        await browser.close()


class Opened:
    """A page without a network, and what it complained about or asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: self.asked.append(request.url))


async def opened(browser: Browser, folder: Path, told: Results) -> Opened:
    path = folder / "report.html"
    path.write_text(report_html(told), "utf-8")
    assert path.stat().st_size < MOST_BYTES
    context = await browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    opened = Opened(await context.new_page())
    await opened.page.goto(path.as_uri())
    assert opened.asked == [path.as_uri()]
    return opened


async def test_the_report_draws_its_plots_from_one_file(browser: Browser, tmp_path: Path) -> None:
    report = await opened(browser, tmp_path, made("handbook"))
    await expect(report.page.locator(".plot .main-svg").first).to_be_visible()
    await expect(report.page.locator(".plot:has(.main-svg)")).to_have_count(5)
    await expect(report.page.locator(".plot").nth(0)).to_contain_text("recall of the known documents")
    await expect(report.page.locator(".plot").nth(0).locator(".points path")).to_have_count(6)
    await expect(report.page.locator("h1")).to_have_text("Tuning of handbook")
    await expect(report.page.locator("tbody").nth(0).locator("tr")).to_have_count(6)
    await expect(report.page.locator(".chosen")).to_contain_text("HEADSTART_TOP_K=3")
    assert (report.complaints, len(report.asked)) == ([], 1)


async def test_names_are_text_wherever_they_stand(browser: Browser, tmp_path: Path) -> None:
    report = await opened(browser, tmp_path, made(HOSTILE))
    await expect(report.page.locator("h1")).to_have_text(f"Tuning of {HOSTILE}")
    await expect(report.page.locator(".plot:has(.main-svg)")).to_have_count(5)
    assert await report.page.title() == f"Headstart: tuning of {HOSTILE}"
    assert report.complaints == []


async def test_without_documents_and_answers_only_times_are_drawn(browser: Browser, tmp_path: Path) -> None:
    report = await opened(browser, tmp_path, made("handbook", known=False))
    await expect(report.page.locator(".plot:has(.main-svg)")).to_have_count(2)
    await expect(report.page.locator(".chosen")).to_contain_text("No recommendation.")
    assert report.complaints == []
