"""Where a request's budget comes from, and what is not a budget."""

import json
import time
from collections.abc import Mapping

import pytest

from gateway.budgets import Budget, Budgets, check_store_metadata, read_budget_header
from gateway.context import RequestContext
from gateway.errors import ApiError
from gateway.wire import ChatRequest, parse_chat

NOT_BUDGETS = [
    "",
    "0",
    "-1",
    "nan",
    "NaN",
    "inf",
    "1e400",
    "soon",
    "31536000000",
    "1_000",
    "١٠٠",
    "0x10",
    " ",
    "1 000",
]


def chat_body(raw_headstart: str | None = None) -> bytes:
    extension = "" if raw_headstart is None else f', "headstart": {raw_headstart}'
    return f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]{extension}}}'.encode()


class Stores:
    """Metadata by store id."""

    def __init__(self, metadata: Mapping[str, Mapping[str, str]]) -> None:
        self._metadata = metadata

    def metadata(self, tenant: str, store_id: str) -> Mapping[str, str]:
        return self._metadata.get(store_id, {})


def context(header: bytes | None = None) -> RequestContext:
    return RequestContext("r", "t", "salt", time.monotonic(), header)


def request(**extension: object) -> ChatRequest:
    return parse_chat(chat_body(json.dumps(extension) if extension else None))[0]


BUDGETED = Stores(
    {"slow": {"ttft_budget_ms": "2000"}, "quick": {"ttft_budget_ms": "500"}, "odd": {"ttft_budget_ms": "x"}}
)


async def test_the_field_wins_over_header_store_and_setting() -> None:
    budgets = Budgets(BUDGETED, 9000, strict=False)
    found = await budgets.of(request(ttft_budget_ms=100), context(b"200"), ("slow",))
    assert found == Budget(0.1, None, False, "headstart.ttft_budget_ms")


async def test_the_header_wins_over_store_and_setting() -> None:
    found = await Budgets(BUDGETED, 9000, strict=False).of(request(), context(b"200.5"), ("slow",))
    assert found == Budget(0.2005, None, False, "X-TTFT-Budget-Ms")


async def test_the_smallest_default_of_the_stores_wins_over_the_setting() -> None:
    found = await Budgets(BUDGETED, 9000, strict=False).of(request(), context(), ("slow", "odd", "quick", "none"))
    assert found == Budget(0.5, None, False, "metadata.ttft_budget_ms")


async def test_without_any_of_them_the_setting_holds() -> None:
    found = await Budgets(BUDGETED, 9000, strict=True).of(request(), context(), ("odd",))
    assert found == Budget(9.0, None, True, "HEADSTART_TTFT_BUDGET_MS")


async def test_a_setting_of_0_is_no_budget() -> None:
    assert await Budgets(BUDGETED, 0, strict=False).of(request(), context(), ()) == Budget()


async def test_a_request_chooses_its_own_policy_and_total() -> None:
    budgets = Budgets(BUDGETED, 0, strict=True)
    found = await budgets.of(request(total_budget_ms=3000, policy="best_effort"), context(), ())
    assert found == Budget(None, 3.0, False, None)


def test_the_deadline_counts_from_arrival_on_the_monotonic_clock() -> None:
    arrived = context()
    assert Budget(ttft_s=1.5).deadline_s(arrived) == arrived.started_s + 1.5
    assert Budget().deadline_s(arrived) is None


@pytest.mark.parametrize("text", NOT_BUDGETS)
def test_a_header_that_is_no_budget_is_refused_by_name(text: str) -> None:
    with pytest.raises(ApiError) as refusal:
        read_budget_header(text.encode())
    assert (refusal.value.http_status, refusal.value.param) == (400, "X-TTFT-Budget-Ms")


async def test_a_wrong_header_is_refused_although_the_field_would_win() -> None:
    with pytest.raises(ApiError):
        await Budgets(BUDGETED, 0, strict=False).of(request(ttft_budget_ms=100), context(b"soon"), ())


@pytest.mark.parametrize("text", NOT_BUDGETS)
def test_a_store_default_that_is_no_budget_is_refused_by_name(text: str) -> None:
    with pytest.raises(ApiError) as refusal:
        check_store_metadata({"ttft_budget_ms": text})
    assert (refusal.value.http_status, refusal.value.param) == (400, "metadata.ttft_budget_ms")


@pytest.mark.parametrize("text", ["1", "0.5", "3600000", "1e3", " 250 "])
def test_milliseconds_within_bounds_are_taken(text: str) -> None:
    check_store_metadata({"ttft_budget_ms": text})
    assert read_budget_header(text.encode()) == float(text)


@pytest.mark.parametrize("field", ["ttft_budget_ms", "total_budget_ms"])
@pytest.mark.parametrize("value", ["0", "-1", "NaN", "Infinity", '"500"', "true", "31536000000", "[1]", "1e999"])
def test_a_field_that_is_no_budget_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_chat(chat_body(f'{{"{field}": {value}}}'))
    assert refusal.value.http_status == 400
    # NaN, Infinity and 1e999 are not JSON.
    assert refusal.value.param == f"headstart.{field}" or refusal.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", '"never"'),
        ("pin_last", "3"),
        ("pin_last", "true"),
        ("evidence_lines", "-1"),
        ("chunk_order", '"up"'),
    ],
)
def test_other_wishes_out_of_range_are_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_chat(chat_body(f'{{"{field}": {value}}}'))
    assert refusal.value.param == f"headstart.{field}"
