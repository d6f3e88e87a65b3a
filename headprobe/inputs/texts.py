"""The texts a model is run on: the embedded sample, a file, or standard input."""

from __future__ import annotations

import codecs
import re
import sys
from importlib.resources import files
from pathlib import Path

from headprobe.errors import HeadprobeError

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SAMPLES = ("english.txt", "chinese.txt")


def sample_texts() -> list[str]:
    """The embedded sample: English paragraphs, then Chinese ones.

    Example:
        >>> len(sample_texts()) > 60
        True
    """
    folder = files("headprobe") / "data"
    return [text for name in _SAMPLES for text in _lines((folder / name).read_text("utf-8"))]


def short_texts(texts: list[str]) -> list[str]:
    """The first four texts, cut to unlike lengths: a batch of them is small and has padding."""
    return [text[: 60 * number] for number, text in enumerate(texts[:4], start=1)]


def read_texts(source: str | Path, *, paragraphs: bool = False) -> list[str]:
    """Read texts from a file or from standard input.

    Args:
        source: a file in UTF-8 (or UTF-16 with a byte order mark), or `"-"` for standard input.
        paragraphs: a text is a paragraph, its lines joined by a space; paragraphs are separated by
            blank lines. Otherwise every line that is not blank is a text.

    Returns:
        The texts in the order of the file, without white space around them; at least one.

    Raises:
        HeadprobeError: if the file is missing, a folder, not readable, not text, or blank.
    """
    content, name = _read(source)
    text = _decode(content, name).replace("\r\n", "\n").replace("\r", "\n")
    texts = _paragraphs(text) if paragraphs else _lines(text)
    if not texts:
        raise HeadprobeError(f"{name} has no text in it: expected at least one line of text.")
    return texts


def _lines(text: str) -> list[str]:
    # Not str.splitlines: that also splits at form feeds and Unicode separators inside a text.
    return [line.strip() for line in text.split("\n") if line.strip()]


def _paragraphs(text: str) -> list[str]:
    joined = (" ".join(_lines(part)) for part in _BLANK_LINES.split(text))
    return [paragraph for paragraph in joined if paragraph]


def _read(source: str | Path) -> tuple[bytes, str]:
    if str(source) == "-":
        return sys.stdin.buffer.read(), "standard input"
    path = Path(source).expanduser()
    name = f"text file {str(source)!r}"
    try:
        return path.read_bytes(), name
    except FileNotFoundError as error:
        raise HeadprobeError(f"{name} does not exist: check the path.") from error
    except OSError as error:
        # Opening a folder fails with another error on every system, so ask.
        if path.is_dir():
            raise HeadprobeError(f"{name} is a folder: name a file inside it.") from error
        raise HeadprobeError(f"{name} can't be read: {error.strerror}.") from error


def _decode(content: bytes, name: str) -> str:
    is_utf16 = content.startswith(_UTF16_MARKS)
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        place = "" if is_utf16 else f" (byte {error.start} is not UTF-8)"
        raise HeadprobeError(f"{name} is not text{place}: save it as UTF-8.") from error
    if "\0" in text:
        raise HeadprobeError(f"{name} is not text (it has NUL bytes): expected UTF-8 text.")
    return text
