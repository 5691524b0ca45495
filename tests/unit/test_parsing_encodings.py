"""Text of every encoding that users have is read, or refused with a cure."""

import os

import pytest

from retrieval.encodings import decode
from retrieval.types import UnusableFile

CHINESE = (
    "根据公司规定，员工每年享有十五天带薪年假。休假申请需要提前两周提交给部门经理审批，如果遇到紧急情况可以电话通知。"
)
TAIWAN = "根據公司規定，員工每年享有十五天帶薪年假。休假申請需要提前兩週提交給部門經理審批。"
KOREAN = "직원은 매년 십오 일의 유급 휴가를 받을 수 있습니다. 휴가 신청은 이 주 전에 부서장에게 제출해야 합니다."
JAPANESE = "従業員は毎年十五日の有給休暇を取得することができます。休暇の申請は二週間前に部長に提出してください。"
FRENCH = (
    "L'employé bénéficie de congés payés, à condition d'être présent. Où est passé le garçon ? Très loin, là-bas."
)
RUSSIAN = (
    "Сотрудники имеют право на пятнадцать дней оплачиваемого отпуска ежегодно. Заявление подается за две недели."
)
THAI = "พนักงานมีสิทธิ์ลาพักร้อนสิบห้าวันต่อปี ต้องแจ้งล่วงหน้าสองสัปดาห์ต่อหัวหน้าแผนก"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (text, encoding)
        for text, encodings in {
            CHINESE: ("gb2312", "gb18030"),
            TAIWAN: ("big5",),
            KOREAN: ("euc_kr", "cp949"),
            JAPANESE: ("shift_jis", "euc_jp"),
            FRENCH: ("latin-1", "cp1252"),
            RUSSIAN: ("cp1251", "koi8-r"),
            THAI: ("cp874",),
        }.items()
        for encoding in (*encodings, "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")
    ],
)
def test_e4_text_of_any_encoding_is_decoded(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding)).text == text


def test_e4_an_encoding_that_the_file_names_is_believed() -> None:
    assert decode("Größe: ½".encode("cp850"), declared="cp850").text == "Größe: ½"
    assert decode("plain é".encode("cp1252"), declared="no-such-codec").text == "plain é"
    assert decode("plain é".encode("cp1252"), declared="zip").text == "plain é"


@pytest.mark.parametrize("data", [b"\x00\x01\x02" * 500, bytes(range(256)) * 20, b"\xff\xfe\x00\xd8\x00"])
def test_e4_binary_data_is_refused_with_a_cure(data: bytes) -> None:
    with pytest.raises(UnusableFile, match=r"Upload|upload") as refusal:
        decode(data)
    assert refusal.value.code == "invalid_file"


def test_e4_random_bytes_are_never_taken_for_text() -> None:
    for _ in range(20):
        with pytest.raises(UnusableFile):
            decode(os.urandom(4096))


def test_e5_decomposed_text_becomes_composed() -> None:
    assert decode("be\u0323\u0302nh".encode()).text == "bệnh"


def test_a_file_that_was_cut_inside_its_last_character_keeps_the_rest() -> None:
    assert decode("công ty bệnh".encode()[:-1] + "ệ".encode()[:2]).text == "công ty bện"


def test_line_ends_and_control_characters_are_cleaned() -> None:
    assert decode(b"a\r\nb\rc\x07\x1b[0m\fd").text == "a\nb\nc[0m\nd"
