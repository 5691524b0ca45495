import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.wire import ENGINE_CONTROLS, ChatMessage, parse_chat, to_json


def raw(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.http_status == 400
    return caught.value


def test_fields_that_the_gateway_does_not_read_stay_in_the_body() -> None:
    request, body = parse_chat(raw(temperature=0.5, stop=["a"], logit_bias={"1": 2}, headstart=None, stream=None))
    assert (body["temperature"], body["stop"], body["logit_bias"]) == (0.5, ["a"], {"1": 2})
    assert not request.stream
    assert request.headstart is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"n": 1.5}, "n"),
        ({"user": "u" * 513}, "user"),
        ({"tools": {}}, "tools"),
        ({"headstart": []}, "headstart"),
        ({"headstart": {"top_k": 0}}, "headstart.top_k"),
        ({"headstart": {"top_k": "5"}}, "headstart.top_k"),
        ({"headstart": {"vector_store_ids": "vs"}}, "headstart.vector_store_ids"),
        ({"headstart": {"vector_store_ids": [""]}}, "headstart.vector_store_ids.0"),
        ({"headstart": {"vector_store_ids": ["v"] * 17}}, "headstart.vector_store_ids"),
        ({"headstart": {"conversation": "a/b"}}, "headstart.conversation"),
        ({"headstart": {"unheard": 1}}, "headstart.unheard"),
        ({"headstart": {"filters": {"type": "like", "key": "a", "value": 1}}}, "headstart.filters"),
        ({"headstart": {"filters": {"type": "eq", "key": "a"}}}, "headstart.filters.value"),
        (
            {"headstart": {"filters": {"type": "and", "filters": [{"type": "eq", "key": "", "value": 1}]}}},
            "headstart.filters.filters.0.key",
        ),
    ],
)
def test_a_wrong_type_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(raw(**fields))
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert error.code == "invalid_value"


@pytest.mark.parametrize("wrapper", ["", "extra_body", "stream_options", "headstart", "chat_template_kwargs"])
def test_h6_each_engine_control_is_refused_by_name_wherever_it_hides(wrapper: str) -> None:
    for name in ENGINE_CONTROLS:
        error = refused(raw(**({wrapper: {name: None}} if wrapper else {name: None})))
        assert error.param == f"{wrapper}.{name}".lstrip(".")


@pytest.mark.parametrize("name", ["tokenize", "messages", "tools", "conversation"])
def test_h6_arguments_of_the_template_call_itself_are_refused(name: str) -> None:
    assert refused(raw(chat_template_kwargs={name: 1})).param == f"chat_template_kwargs.{name}"
    parse_chat(raw(chat_template_kwargs={"enable_thinking": False}))


def test_h7_what_was_read_but_cannot_be_written_again_is_a_400() -> None:
    deep = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":' + b"[" * 500 + b"]" * 500 + b"}"
    _, body = parse_chat(deep)
    with pytest.raises(ApiError, match="nests too deep") as caught:
        to_json(body)
    assert caught.value.http_status == 400


def test_h7_a_complaint_about_a_very_long_field_is_short() -> None:
    error = refused(raw(headstart={"f" * 100_000: 1}))
    assert len(error.message) < 700
    assert error.param is not None
    assert len(error.param) <= 300


def test_filters_nest_at_most_eight_deep() -> None:
    inner: dict[str, Any] = {"type": "eq", "key": "a", "value": 1}
    for _ in range(8):
        inner = {"type": "and", "filters": [inner]}
    request, _ = parse_chat(raw(headstart={"filters": inner}))
    assert request.headstart is not None
    assert request.headstart.filters is not None
    found = request.headstart.filters.to_filter()
    assert found.filters[0].type == "and"
    request, _ = parse_chat(raw(headstart={"filters": {"type": "or", "filters": [inner]}}))
    assert request.headstart is not None
    assert request.headstart.filters is not None
    with pytest.raises(ApiError, match="at most 8 deep"):
        request.headstart.filters.to_filter()


@pytest.mark.parametrize(
    ("asked", "wants"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": None}, False),
        ({"include_usage": True}, True),
    ],
)
def test_d3_usage_is_wanted_only_when_it_is_asked_for(asked: Any, wants: bool) -> None:
    request, _ = parse_chat(raw(stream=True, stream_options=asked))
    assert request.wants_usage is wants


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert parse_chat(raw(max_tokens=5, max_completion_tokens=7))[0].answer_limit == 7
    assert parse_chat(raw(max_tokens=5))[0].answer_limit == 5
    assert parse_chat(raw())[0].answer_limit is None


@pytest.mark.parametrize(
    ("message", "text", "plain"),
    [
        ({"role": "user", "content": "a"}, "a", True),
        ({"role": "user", "content": "a", "name": "ann"}, "a", True),
        ({"role": "user", "content": "a", "tool_calls": None, "refusal": None}, "a", True),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb", True),
        ({"role": "user", "content": []}, "", True),
        ({"role": "assistant", "content": ""}, "", True),
        ({"role": "assistant", "content": None}, "", False),
        ({"role": "assistant", "content": "a", "reasoning": "because"}, "a", False),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "", False),
        ({"role": "tool", "content": "a"}, "a", False),
        ({"role": "function", "content": "a"}, "a", False),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "a", False),
        ({"role": "user", "content": [{"type": "text"}]}, "", False),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "", False),
    ],
)
def test_a_message_is_plain_when_role_and_text_are_all_of_it(message: Any, text: str, plain: bool) -> None:
    read = ChatMessage.model_validate(message)
    assert (read.text, read.plain) == (text, plain)
