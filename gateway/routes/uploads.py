"""Reads one multipart upload, counted while it comes, spooled to disk beyond a mebibyte."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, cast

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from gateway.errors import ApiError, ErrorKind
from gateway.http import BodyClock, header
from gateway.routes.dependencies import BodyLimits
from gateway.wire import invalid

IN_MEMORY_BYTES = 1 << 20
FORM_BYTES = 1 << 18
"""Room for the form around the file: boundaries, headers, the other fields."""
_HEADER_BYTES = 1 << 16
_HEADERS = 16
_FIELDS = 16
_FIELD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Upload:
    """`content` is positioned at its start; leaving the block closes it."""

    filename: str
    content: BinaryIO
    size_bytes: int
    fields: Mapping[str, str]

    def __enter__(self) -> "Upload":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.content.close()


async def read_upload(request: Request, limits: BodyLimits) -> Upload:
    """The form's one file, named `file`, and its text fields.

    Raises ApiError: 400 for a form that is not one or has no file, 408 when no more of it comes in time, 413 for
    a file over the limit, whatever length was declared; ClientGone.
    """
    declared = header(request.scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limits.max_upload_bytes + FORM_BYTES:
        raise _too_large(limits.max_upload_bytes)
    form = _Form(_boundary(request), limits.max_upload_bytes)
    try:
        received_bytes, more = 0, True
        clock = BodyClock(limits.timeout_s)
        while more:
            piece, more = await _receive(request, clock)
            received_bytes += len(piece)
            if received_bytes > limits.max_upload_bytes + FORM_BYTES:
                raise _too_large(limits.max_upload_bytes)
            # Small uploads stay in memory; beyond that the write is disk I/O and leaves the event loop.
            if form.size_bytes + len(piece) > IN_MEMORY_BYTES:
                await run_in_threadpool(form.feed, piece)
            else:
                form.feed(piece)
        return form.finish()
    except BaseException:
        form.content.close()
        raise


async def _receive(request: Request, clock: BodyClock) -> tuple[bytes, bool]:
    try:
        return await clock.receive(request.receive)
    except TimeoutError:
        raise ApiError(
            ErrorKind.TIMEOUT, f"The upload did not come within {clock.timeout_s:g} s.", code="body_timeout"
        ) from None


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(header(request.scope, b"content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid("Send the upload as multipart/form-data with the fields 'file' and 'purpose'.", "file")
    return boundary


class _Form:
    """Collects what the parser finds. Nothing a client sends grows without a bound."""

    def __init__(self, boundary: bytes, max_file_bytes: int) -> None:
        self.content = cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES))  # noqa: SIM115
        self.size_bytes = 0
        self._max_file_bytes = max_file_bytes
        self._filename: str | None = None
        self._fields: dict[str, str] = {}
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._field = ""
        self._value = bytearray()
        self._in_file = False
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_name_comes,
                    "on_header_value": self._header_value_comes,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data_comes,
                    "on_part_end": self._part_ends,
                    "on_end": self._form_ends,
                },
                max_header_count=_HEADERS,
                max_header_size=_HEADER_BYTES,
            )
        except FormParserError:
            raise _malformed() from None

    def feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError:
            raise _malformed() from None

    def finish(self) -> Upload:
        if not self._ended:
            raise _malformed()
        if self._filename is None:
            raise invalid("The field 'file' is missing; send it as a file with a name.", "file")
        self.content.seek(0)
        return Upload(self._filename, self.content, self.size_bytes, self._fields)

    def _part_begins(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _header_name_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_value_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = b"filename" in options
        if self._in_file:
            if self._field != "file" or self._filename is not None:
                raise invalid("Send one file, in the field 'file'.", self._field or "file")
            self._filename = options[b"filename"].decode("utf-8", "replace")
        elif self._field == "file":
            raise invalid("The field 'file' must be a file with a name, not text.", "file")
        elif len(self._fields) == _FIELDS or self._field in self._fields:
            raise invalid("The form has too many fields, or one of them twice.", self._field[:64])

    def _data_comes(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.size_bytes += end - start
            if self.size_bytes > self._max_file_bytes:
                raise _too_large(self._max_file_bytes)
            self.content.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _FIELD_BYTES:
            raise invalid(f"The field is longer than {_FIELD_BYTES} bytes.", self._field[:64])

    def _part_ends(self) -> None:
        if not self._in_file:
            self._fields[self._field] = self._value.decode("utf-8", "replace")

    def _form_ends(self) -> None:
        self._ended = True


def _malformed() -> ApiError:
    return ApiError(
        ErrorKind.INVALID, "The upload is not a whole multipart/form-data body.", param="file", code="invalid_upload"
    )


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        ErrorKind.TOO_LARGE,
        f"The file is larger than the limit of {limit_bytes} bytes. Split it, or raise HEADSTART_MAX_UPLOAD_BYTES.",
        param="file",
        code="file_too_large",
    )
