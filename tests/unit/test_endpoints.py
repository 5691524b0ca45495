import pytest

from gateway.endpoints import Endpoint, parse_endpoints


def test_one_url_is_the_engine() -> None:
    assert parse_endpoints("http://127.0.0.1:8000") == (Endpoint("engine", "http://127.0.0.1:8000"),)


def test_several_urls_are_numbered_by_their_place() -> None:
    assert parse_endpoints("http://a:8000, http://b:8000") == (
        Endpoint("engine-1", "http://a:8000"),
        Endpoint("engine-2", "http://b:8000"),
    )


def test_names_may_be_given_to_some() -> None:
    endpoints = parse_endpoints("left=http://a,http://b,gpu.2_x=https://c/base")
    assert [(endpoint.name, endpoint.url) for endpoint in endpoints] == [
        ("left", "http://a"),
        ("engine-2", "http://b"),
        ("gpu.2_x", "https://c/base"),
    ]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://Engine:8000/", "http://engine:8000"),
        ("http://engine:80/v1", "http://engine"),
        ("https://engine:443/base/v1/", "https://engine/base"),
        ("http://engine/a=b", "http://engine/a=b"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("HTTP://engine", "http://engine"),
    ],
)
def test_a_url_is_brought_into_one_form(url: str, base: str) -> None:
    assert parse_endpoints(url) == (Endpoint("engine", base),)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "must begin with"),
        ("planted", "must begin with"),
        ("planted:8000", "must begin with"),
        ("ftp://planted", "must begin with"),
        ("http://", "must begin with"),
        ("http://a,", "must begin with"),
        ("http://planted:secret@engine", "takes no user"),
        ("http://engine/?planted", "takes no user"),
        ("http://engine/#planted", "takes no user"),
        ("http://engine:planted", "port"),
        ("http://engine:99999", "port"),
        ("http://[planted", "is not a URL"),
        ("http://plan ted", "blank"),
        ("http://plan\0ted", "control"),
        ("planted name=http://a", "names of 1 to 64"),
        (f"{'planted' * 10}=http://a", "names of 1 to 64"),
        ("=http://a", "names of 1 to 64"),
        ("planted=http://a,planted=http://b", "a name twice"),
        ("engine-2=http://planted,http://b", "a name twice"),
        ("x=http://planted:80/,y=http://PLANTED/v1", "a URL twice"),
    ],
)
def test_h4_a_bad_value_is_refused_with_its_reason_and_never_repeated(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_endpoints(value)
    assert "planted" not in str(caught.value).lower()
    assert "99999" not in str(caught.value)
    assert caught.value.__cause__ is None
