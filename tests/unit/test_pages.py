"""A gateway without keys is for this machine; a web page of another site is not this machine."""

import pytest

from gateway.errors import ApiError
from gateway.pages import refuse_foreign_pages


def scope(**headers: str) -> dict[str, object]:
    return {"headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]}


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:80", "127.1.2.3", "[::1]:9000", "LOCALHOST:1"]
)
def test_this_machine_is_let_in(host: str) -> None:
    refuse_foreign_pages(scope(host=host))
    refuse_foreign_pages(scope(host=host, origin=f"http://{host}"))


def test_a_client_that_names_no_host_is_let_in() -> None:
    refuse_foreign_pages(scope())


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("host", "evil.example:8080"),
        ("host", "127.0.0.1.evil.example"),
        ("host", "localhost.evil.example:80"),
        ("host", "a/?x=127.0.0.1"),
        ("host", ""),
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("origin", "http://127.0.0.1@evil.example"),
    ],
)
def test_h1_another_site_is_refused_and_told_why(header: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"(?i){header}") as refused:
        refuse_foreign_pages(scope(**{"host": "127.0.0.1", header: value}))
    assert refused.value.http_status == 403
