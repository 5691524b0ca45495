import orjson
import pytest

from gateway.errors import ApiError, ErrorKind, translate
from retrieval.types import NotFound, RetrievalError, StoreExpired, UnusableFile


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_error_has_openais_shape(kind: ErrorKind) -> None:
    error = ApiError(kind, "It is so. Do this.", param="p", code="c")
    assert orjson.loads(error.body_bytes()) == {
        "error": {"message": "It is so. Do this.", "type": kind.value[1], "param": "p", "code": "c"}
    }
    assert 400 <= error.http_status < 600
    assert error.event_bytes() == b"data: " + error.body_bytes() + b"\n\n"


def test_the_engines_own_status_can_be_passed_on() -> None:
    assert ApiError(ErrorKind.INVALID, "no", status=422).http_status == 422


@pytest.mark.parametrize(
    ("wait_s", "whole", "exact"),
    [(1.0, "1", "1000"), (0.25, "1", "250"), (2.001, "3", "2001"), (2.0, "2", "2000"), (0.0, "0", "0")],
)
def test_retry_after_is_never_shorter_than_the_wait(wait_s: float, whole: str, exact: str) -> None:
    error = ApiError(ErrorKind.UNAVAILABLE, "wait", retry_after_s=wait_s)
    assert error.headers() == {"retry-after": whole, "retry-after-ms": exact}


def test_other_errors_have_no_headers_but_how_to_sign_in() -> None:
    assert ApiError(ErrorKind.INVALID, "no").headers() == {}
    assert ApiError(ErrorKind.UNAUTHENTICATED, "no").headers() == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFound("vector store", "vs_1"), 404, "vector_store_not_found"),
        (NotFound("file", "f_1"), 404, "file_not_found"),
        (UnusableFile("empty_file", "The file is empty."), 400, "empty_file"),
        (StoreExpired("vs_1"), 400, "vector_store_expired"),
        (RetrievalError("no"), 400, None),
    ],
)
def test_errors_of_retrieval_become_what_a_client_can_act_on(
    error: RetrievalError, status: int, code: str | None
) -> None:
    translated = translate(error)
    assert (translated.http_status, translated.code) == (status, code)
    assert translated.message == str(error)


def test_a_very_long_name_is_not_repeated_whole() -> None:
    assert len(translate(NotFound("file", "x" * 60_000)).message) <= 500
