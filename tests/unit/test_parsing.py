"""Every kind of file becomes sections under their headings, or an error that names the cure."""

import io
import time
import zipfile

import docx
import pytest
from fpdf import FPDF
from pypdf import PdfReader, PdfWriter

from retrieval.parsing import parse
from retrieval.sections import ParseLimits
from retrieval.types import UnusableFile


def texts(data: bytes | str, name: str) -> list[tuple[str, str]]:
    parsed = parse(data.encode() if isinstance(data, str) else data, name)
    return [(" > ".join(section.heading_path), section.text) for section in parsed.sections]


def pdf(*pages: str) -> bytes:
    document = FPDF()
    for page in pages:
        document.add_page()
        document.set_font("helvetica", size=12)
        if page:
            document.multi_cell(0, 8, page)
    return bytes(document.output())


def word(build: object = None) -> bytes:
    document = docx.Document()
    document.add_heading("Handbook", 0)
    document.add_heading("Leave", 1)
    document.add_paragraph("Thirty days a year.")
    document.add_heading("Parental leave", 2)
    document.add_paragraph("Sixteen weeks.", style="List Bullet")
    table = document.add_table(rows=2, cols=2)
    for row, cells in zip(table.rows, (("Grade", "Days"), ("A", "30")), strict=True):
        for cell, text in zip(row.cells, cells, strict=True):
            cell.text = text
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def test_markdown_keeps_the_path_of_headings_and_its_source() -> None:
    source = (
        "Intro\n\n# Leave\nGeneral **rules**.\n\n- one\n- two\n\n## Parental `leave`\n16 weeks\n\n# Pay\nMonthly."
    )
    assert texts(source, "a.md") == [
        ("", "Intro"),
        ("Leave", "General **rules**.\n\n- one\n- two\n"[:-1]),
        ("Leave > Parental leave", "16 weeks"),
        ("Pay", "Monthly."),
    ]


def test_markdown_tables_become_rows_that_name_their_columns() -> None:
    assert texts("| Item | Price |\n| --- | --- |\n| Rope | 3 € |\n| Hook | 1 € |\n", "a.md") == [
        ("", "Item: Rope; Price: 3 €\nItem: Hook; Price: 1 €")
    ]


def test_markdown_front_matter_is_no_heading_and_code_is_not_parsed() -> None:
    source = "---\ntitle: Rules\n---\n# A\n```\n# not a heading\n```\n"
    assert texts(source, "a.md") == [("", "title: Rules"), ("A", "```\n# not a heading\n```")]


def test_a_heading_with_nothing_below_it_is_kept_as_text() -> None:
    assert texts("# Ship\n## Decks\n# Crew\n", "a.md") == [("Ship > Decks", "Decks"), ("Crew", "Crew")]


def test_html_shows_what_a_reader_sees() -> None:
    source = """<!doctype html><html><head><title>T</title><style>p{}</style></head><body>
    <nav><a href=/>Home</a></nav><h1>Leave</h1><p>Thirty <b>days</b><br>a year.<script>alert(1)</script> Paid.</p>
    <ul><li>one<li>two</ul><h2>Parental</h2><div>Sixteen<!-- no --> weeks<p hidden>secret</p></div>
    <table><caption>Fares</caption>
    <tr><th>Age</th><th>Price</th></tr><tr><td>Adult</td><td>9 <i>€</i></td></tr></table>
    after<pre>a\n  b</pre></body></html>"""
    assert texts(source, "a.html") == [
        ("Leave", "Thirty days\na year. Paid.\n\n- one\n\n- two"),
        ("Leave > Parental", "Sixteen weeks\n\nFares\nAge: Adult; Price: 9 €\n\nafter\n\na\n b"),
    ]


def test_html_without_a_heading_has_its_title_and_is_known_without_an_extension() -> None:
    assert texts("<html><title>Lost property</title><p>Ask at the pier.", "page") == [
        ("Lost property", "Ask at the pier.")
    ]


def test_deeply_nested_html_keeps_all_its_text_or_is_refused() -> None:
    def nested(depth: int) -> str:
        return f"<p>before</p>{'<div>' * depth}inside{'</div>' * depth}<p>after</p>"

    assert texts(nested(1_000), "a.html") == [("", "before\n\ninside\n\nafter")]
    with pytest.raises(UnusableFile, match="deeper") as refused:
        parse(nested(100_000).encode(), "a.html")
    assert refused.value.code == "invalid_file"


def test_e4_html_is_decoded_as_it_declares() -> None:
    source = '<html><meta charset="euc-kr"><p>안전 수칙</p></html>'.encode("euc_kr")
    assert texts(source, "a.html") == [("", "안전 수칙")]


def test_deeply_nested_html_costs_neither_stack_nor_time() -> None:
    started = time.monotonic()
    source = "<p>first</p>" + "<div>" * 50_000 + "deep" + "</div>" * 50_000
    with pytest.raises(UnusableFile, match="deeper"):
        parse(source.encode(), "a.html")
    assert time.monotonic() - started < 10


def test_csv_rows_can_be_understood_alone() -> None:
    source = 'Item;Price;Note\nRope;"3,50";"two\nlines"\n\nHook;1;\n'
    assert texts(source, "a.csv") == [("", "Item: Rope; Price: 3,50; Note: two lines\nItem: Hook; Price: 1")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_finds_its_delimiter_and_years_name_columns(delimiter: str) -> None:
    source = 'Item|2025|2026\n"Rope, long; thick"|3,50|4,00\n'.replace("|", delimiter)
    if delimiter == ",":
        source = source.replace("3,50", '"3,50"').replace("4,00", '"4,00"')
    assert texts(source, "a.csv") == [("", "Item: Rope, long; thick; 2025: 3,50; 2026: 4,00")]


def test_csv_without_a_header_keeps_every_row() -> None:
    assert texts("1,rope\n2,hook\n", "a.csv") == [("", "1; rope\n2; hook")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "gb2312", "gb18030"])
def test_e4_csv_in_utf16_or_gb2312_is_decoded(encoding: str) -> None:
    source = "姓名,部门,电话\n王小明,人事部,一二三\n李大国,工程部,四五六\n".encode(encoding)
    assert texts(source, "a.csv") == [
        ("", "姓名: 王小明; 部门: 人事部; 电话: 一二三\n姓名: 李大国; 部门: 工程部; 电话: 四五六")
    ]


def test_json_names_every_value_by_its_path() -> None:
    assert texts('{"ship": {"name": "Pellen", "decks": [1, 2], "sold": null}}', "a.json") == [
        ("", "ship.name: Pellen\nship.decks: 1\nship.decks: 2")
    ]
    assert texts('[{"a": 1, "b": "x\\ny"}, {"a": true}]', "a.json") == [("", "a: 1; b: x y\na: true")]


def test_json_lines_have_one_row_each_and_errors_name_the_line() -> None:
    assert texts('{"a": 1}\n\n{"a": 2}\n', "a.jsonl") == [("", "a: 1\na: 2")]
    with pytest.raises(UnusableFile, match="Line 2"):
        parse(b'{"a": 1}\n{"a": \n', "a.jsonl")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a": NaN}', b"{'a': 1}"])
def test_broken_or_hostile_json_is_an_error_that_says_so(data: bytes) -> None:
    with pytest.raises(UnusableFile, match="not valid JSON"):
        parse(data, "a.json")


def test_pdf_pages_are_named_in_the_title() -> None:
    assert texts(pdf("First page.", "", "Third page."), "a.pdf") == [
        ("Page 1", "First page."),
        ("Page 3", "Third page."),
    ]


def test_docx_keeps_headings_lists_and_tables() -> None:
    assert texts(word(), "a.docx") == [
        ("Handbook > Leave", "Thirty days a year."),
        ("Handbook > Leave > Parental leave", "- Sixteen weeks.\n\nGrade: A; Days: 30"),
    ]


def test_e5_every_format_is_composed() -> None:
    decomposed = "be\u0323\u0302nh"
    for name in ("a.txt", "a.md", "a.csv", "a.html"):
        assert texts(decomposed, name)[0][1] == "bệnh"
    assert texts('{"k": "be\\u0323\\u0302nh"}', "a.json") == [("", "k: bệnh")]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"", "a.txt"),
        (b" \n\t\r\n ", "a.md"),
        ("\u200b\u3000\u00a0\ufeff".encode(), "a.txt"),
        (b"\xff\xfe\n\x00", "a.txt"),
        (b"<html><script>x</script></html>", "a.html"),
        (b"[]", "a.json"),
        (b",,\n,,\n", "a.csv"),
        (pdf(""), "a.pdf"),
    ],
)
def test_e1_files_without_text_are_empty_files(data: bytes, name: str) -> None:
    with pytest.raises(UnusableFile) as refusal:
        parse(data, name)
    assert refusal.value.code == "empty_file"


def test_e10_a_locked_pdf_is_refused_with_a_cure() -> None:
    writer = PdfWriter(PdfReader(io.BytesIO(pdf("secret"))))
    writer.encrypt("password", algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    with pytest.raises(UnusableFile, match="Remove the password"):
        parse(buffer.getvalue(), "a.pdf")


def test_e10_a_pdf_that_only_forbids_editing_is_read() -> None:
    writer = PdfWriter(PdfReader(io.BytesIO(pdf("public"))))
    writer.encrypt("", owner_password="owner", algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    assert texts(buffer.getvalue(), "a.pdf") == [("Page 1", "public")]


@pytest.mark.parametrize("data", [b"%PDF-1.7\ngarbage", pdf("text")[:300], pdf("text").replace(b"/Page", b"/Pxge")])
def test_e10_a_broken_pdf_is_refused_with_a_cure(data: bytes) -> None:
    with pytest.raises(UnusableFile, match=r"anew|recognition"):
        parse(data, "a.pdf")


def test_e10_a_pdf_of_too_many_pages_is_refused() -> None:
    with pytest.raises(UnusableFile, match="3 pages; the most is 2"):
        parse(pdf("a", "b", "c"), "a.pdf", ParseLimits(max_pages=2))


def test_e10_a_zip_bomb_in_a_docx_is_refused_before_it_is_unpacked() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        with archive.open("word/document.xml", "w", force_zip64=True) as part:
            for _ in range(300):
                part.write(b" " * 2**20)
    assert len(buffer.getvalue()) < 2**20
    started = time.monotonic()
    with pytest.raises(UnusableFile, match="unpacks to"):
        parse(buffer.getvalue(), "a.docx")
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("data", "name", "code"),
    [
        (word()[:2000], "a.docx", "invalid_file"),
        (b"no archive", "a.docx", "invalid_file"),
        (b"no pdf", "a.pdf", "invalid_file"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 500, "a.docx", "invalid_file"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 500, "a.doc", "unsupported_file"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 500, "a.txt", "unsupported_file"),
        (b"\x7fELF" + b"\0" * 500, "a", "unsupported_file"),
    ],
)
def test_e10_foreign_and_broken_files_are_refused(data: bytes, name: str, code: str) -> None:
    with pytest.raises(UnusableFile) as refusal:
        parse(data, name)
    assert refusal.value.code == code


def test_e10_text_and_time_are_bounded() -> None:
    with pytest.raises(UnusableFile, match="characters"):
        parse(b"x" * 2000, "a.txt", ParseLimits(max_text_characters=1000))
    with pytest.raises(UnusableFile, match="seconds"):
        parse(b"a,b\n" * 10, "a.csv", ParseLimits(max_seconds=-1))
