"""How values are written: exact and deterministic in files, short on the page."""

import csv
import io
import json
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import pandas as pd
from markupsafe import Markup

# What JSON can hold; its mappings and lists are nested.
Json: TypeAlias = Any

# A spreadsheet takes a cell that begins with one of these for a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

# Inside <script>, these could end the element, open a comment or break a line of the program.
_SCRIPT_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def plain(value: object) -> Json:
    """Return a value as JSON can hold it: missing and infinite numbers become None.

    Args:
        value: A scalar of Python, numpy or pandas, or a mapping or sequence of such.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        value = value.tolist()
        return plain(value) if isinstance(value, list) else _finite(value)
    return _finite(value)


def _finite(value: object) -> Json:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool) else str(value)


def csv_text(table: pd.DataFrame) -> str:
    r"""Return a table as CSV: `\n` line ends, 6 significant digits, a missing value is empty.

    Text that a spreadsheet would run as a formula gets a leading apostrophe.
    """
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(table.columns)
    columns = [[_csv_cell(value) for value in values(table[name])] for name in table.columns]
    writer.writerows(zip(*columns, strict=True))
    return stream.getvalue()


def values(column: "pd.Series[Any]") -> list[Any]:
    """Return a column as plain Python values, None where one is missing."""
    return [plain(value) for value in column.tolist()]


def _csv_cell(value: Json) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value + 0.0:.6g}"  # + 0.0: no negative zero; 3.0 comes out as 3
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA_STARTS) else text


def json_text(value: object) -> str:
    """Return a value as indented JSON; NaN becomes null."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def script_json(value: object) -> Markup:
    """Return a value as compact JSON that is safe inside a <script> element."""
    text = json.dumps(
        plain(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).translate(_SCRIPT_ESCAPES)
    return Markup(text)  # safe: every character that HTML could act on is escaped


def rounded(numbers: Iterable[Any], digits: int) -> list[Any]:
    """Round floats to significant digits; everything else passes as it is."""
    return [float(f"{x:.{digits}g}") if isinstance(x, float) else x for x in numbers]


def shown(value: object) -> str:
    """Return a value as the page shows it, numbers with 4 significant digits.

    Examples:
        >>> shown(0.123456), shown(1234567.0), shown(3), shown(None), shown(True)
        ('0.1235', '1234567', '3', '', 'yes')
    """
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value + 0.0:.4g}"
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value)
    return str(value)
