"""Bytes to text when nobody says the encoding: byte-order marks, UTF-8, UTF-16, then East Asian, then the rest."""

import codecs
import unicodedata
from dataclasses import dataclass

from charset_normalizer import from_bytes

from retrieval.types import UnusableFile

SAMPLE_BYTES = 65_536
_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# East Asian encodings share most byte sequences, so validity decides nothing: what tells them apart is whether the
# decoded text consists of the language's commonest characters, which are a third to a half of any real text.
_COMMON = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心本前开但因只从想实日"
    "這個們來為國說時會對過發後裡種經麼學現當沒動還進樣開從實"
    "이다는을의에가고하지로기리서은도사나한를대자인어시해아라일수들있그게과보여제정것만니전원부용주장요으습"
    "のにはをたがでてとしれさるいかなこもすまよりらそうくあつけんおきだわアイスルトリンドラックーシテマ"
)
_CJK_PUNCTUATION = frozenset("，。、；：？！（）《》「」『』“”・　")
# EUC-KR before GB18030: the latter accepts nearly every pair of bytes. Big5 last, because it is the rarest.
_EAST_ASIAN = ("euc_kr", "gb18030", "shift_jis", "euc_jp", "cp949", "big5")
# Those in which text files are still found; the guesser's full list holds DOS and Macintosh pages that fit anything.
_SINGLE_BYTE = (
    "cp1252",
    "cp1250",
    "cp1251",
    "koi8_r",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
    "cp1257",
    "cp1258",
    "cp874",
)
_LEAST_COMMON_SHARE = 0.12
LEAST_ORDINARY = 0.3


@dataclass(frozen=True, slots=True)
class Decoded:
    """`text` is NFC with `\\n` line ends; `encoding` is the codec's name."""

    text: str
    encoding: str


def decode(data: bytes, declared: str | None = None) -> Decoded:
    """Text of a file. `declared` is the encoding that the file itself names, tried after UTF-8.
    UTF-8 comes first where there is no zero byte: text of another encoding is hardly ever valid in it.

    Raises UnusableFile (invalid_file) for binary data and for text whose encoding cannot be told.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _strict(data, encoding)
    if b"\0" not in data:
        try:
            return _clean(data.decode("utf-8"), "utf-8")
        except UnicodeDecodeError as error:
            # One cut character behind whole ones of several bytes is a truncated file, not another encoding.
            whole = data[: error.start]
            if error.reason == "unexpected end of data" and len(data) - error.start <= 3 and not whole.isascii():
                return _clean(whole.decode("utf-8"), "utf-8")
    utf16 = _utf16(data)
    if utf16 is not None:
        return _strict(data, utf16)
    if b"\0" in data:
        raise _binary()
    if declared is not None and _known(declared):
        declared_text = _try(data, declared)
        if declared_text is not None:
            return _clean(declared_text, declared)
    for encoding in filter(None, (_east_asian(data), _other(data))):
        text = _try(data, encoding)
        if text is not None:
            return _clean(text, encoding)
    raise UnusableFile(
        "invalid_file",
        "The encoding of the text could not be determined. Save the file as UTF-8 and upload it again.",
    )


def normalise(text: str) -> str:
    """NFC, `\\n` line ends, without NUL and other control characters that no reader sees."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return text.translate(_INVISIBLE)


_INVISIBLE = {code: None for code in (*range(32), 127, 0xFEFF) if chr(code) not in "\t\n\f"} | {0x0C: "\n"}


def _utf16(data: bytes) -> str | None:
    """UTF-16 without a mark: decodes in one byte order into common characters, and not in the other."""
    sample = data[: SAMPLE_BYTES - SAMPLE_BYTES % 2]
    if len(data) < 2 or len(data) % 2:
        return None
    scores = {}
    for encoding in ("utf-16-le", "utf-16-be"):
        text = _try(sample, encoding, final=len(sample) == len(data))
        if text is not None:
            scores[encoding] = sum(_is_ordinary(c) for c in text) / max(1, len(text))
    if not scores:
        return None
    best = max(scores, key=lambda encoding: scores[encoding])
    other = min(scores.values()) if len(scores) == 2 else 0.0
    # Random pairs of bytes are ordinary in one case of twelve; real Chinese, the poorest text, in one of two.
    return best if scores[best] >= LEAST_ORDINARY and scores[best] - other >= 0.2 else None


def _is_ordinary(character: str) -> bool:
    code = ord(character)
    if code < 0x250:  # Latin
        return code >= 32 or character in "\t\n\r"
    return character in _COMMON or character in _CJK_PUNCTUATION or 0x370 <= code < 0x1200 or 0x1E00 <= code < 0x2100


def _east_asian(data: bytes) -> str | None:
    best, best_share = None, _LEAST_COMMON_SHARE
    for encoding in _EAST_ASIAN:
        text = _try(data[:SAMPLE_BYTES], encoding, final=len(data) <= SAMPLE_BYTES)
        if text is None:
            continue
        foreign = [c for c in text if ord(c) > 127 and c not in _CJK_PUNCTUATION]
        share = sum(c in _COMMON for c in foreign) / max(1, len(foreign))
        # Half-width kana is what Shift-JIS makes of the bytes of every other encoding.
        share -= sum(0xFF61 <= ord(c) <= 0xFF9F for c in foreign) / max(1, len(foreign))
        if share > best_share:
            best, best_share = encoding, share
    return best


def _other(data: bytes) -> str | None:
    sample = data[:SAMPLE_BYTES]
    if sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in sample) > len(sample) // 100:
        raise _binary()
    match = from_bytes(sample, cp_isolation=list(_SINGLE_BYTE)).best()
    # Too short or too plain to tell: the encoding of the web, which maps nearly every byte.
    return "cp1252" if match is None else match.encoding


def _try(data: bytes, encoding: str, final: bool = True) -> str | None:
    try:
        return codecs.getincrementaldecoder(encoding)("strict").decode(data, final)
    except (UnicodeDecodeError, LookupError):
        return None


def _known(encoding: str) -> bool:
    try:
        # Codecs such as `zip` or `rot13` are no text encodings.
        return codecs.lookup(encoding)._is_text_encoding
    except (LookupError, ValueError):
        return False


def _strict(data: bytes, encoding: str) -> Decoded:
    try:
        return _clean(data.decode(encoding), encoding)
    except UnicodeDecodeError as error:
        raise UnusableFile(
            "invalid_file",
            f"The text looks like {encoding.upper()} but is broken at byte {error.start}. "
            f"Save the file as UTF-8 and upload it again.",
        ) from None


def _clean(text: str, encoding: str) -> Decoded:
    return Decoded(normalise(text), encoding)


def _binary() -> UnusableFile:
    return UnusableFile(
        "invalid_file",
        "The file is binary, not text. Upload text, Markdown, HTML, PDF, DOCX, CSV or JSON.",
    )
