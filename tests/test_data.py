import unicodedata
from importlib.resources import files

import pytest

CJK_BLOCK = range(0x4E00, 0xA000)


def read_paragraphs(name: str) -> list[str]:
    text = (files("headprobe") / "data" / name).read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")


@pytest.mark.parametrize(("name", "at_least"), [("english.txt", 60), ("chinese.txt", 10)])
def test_sample_has_enough_distinct_paragraphs(name: str, at_least: int) -> None:
    paragraphs = read_paragraphs(name)
    assert len(paragraphs) >= at_least
    assert len(set(paragraphs)) == len(paragraphs)


@pytest.mark.parametrize("name", ["english.txt", "chinese.txt"])
def test_sample_paragraphs_are_clean(name: str) -> None:
    for paragraph in read_paragraphs(name):
        assert paragraph
        assert paragraph == paragraph.strip()
        assert not any(unicodedata.category(character) == "Cc" for character in paragraph)


def test_chinese_paragraphs_are_mostly_cjk() -> None:
    for paragraph in read_paragraphs("chinese.txt"):
        cjk = sum(ord(character) in CJK_BLOCK for character in paragraph)
        assert cjk / len(paragraph) > 0.6, paragraph
