"""The data that the page's script draws from, packed so that the page stays small."""

import base64
from typing import Any

import numpy as np
import pandas as pd

from headprobe.report.formatting import rounded, values
from headprobe.report.tables import HeadKey, Tables, grid_names, grids, head_keys

MEASURES = ("js_similarity", "overlap", "cosine", "cka", "output_cosine")
IDENTITY = ("kind", "stack", "layer", "head")
NEAREST = ("nearest_kind", "nearest_stack", "nearest_layer", "nearest_head")

# Numbers that name something; a colour scale over them would mean nothing.
_LABELS = {"kv_group", "group"}

_MISSING = 0xFFFF


def head_labels(heads: pd.DataFrame) -> list[str]:
    """Return a short name per head, like "L3H5", or "decoder cross L3H5" where streams differ."""
    names = grid_names(heads)
    return [
        f"{names[kind, stack]} L{layer}H{head}".strip()
        for kind, stack, layer, head in head_keys(heads)
    ]


def describe(name: str, glossary: pd.DataFrame) -> dict[str, Any]:
    """Return a statistic's glossary row; one without a row is titled by its name."""
    entry: dict[str, Any] = dict.fromkeys(("title", "unit", "low", "high", "definition", "source"))
    rows = glossary[glossary["name"] == name] if len(glossary) else glossary
    if len(rows):
        entry |= {key: values(rows[key])[0] for key in entry if key in rows}
    if entry["title"] is None and name.endswith("_mean"):
        of = describe(name.removesuffix("_mean"), glossary)
        entry |= {"title": f"{of['title']}, mean", "unit": of["unit"]}
    entry["title"] = entry["title"] or name.replace("_", " ").capitalize()
    return {"name": name, **entry}


def embedded(tables: Tables) -> dict[str, Any]:
    """Return everything that the script needs to draw the map, the matrix and a head's figures."""
    heads = tables.heads
    keys = head_keys(heads)
    order = {key: position for position, key in enumerate(keys)}
    names = grid_names(heads)
    columns = [str(c) for c in heads if c not in IDENTITY + NEAREST and heads[c].notna().any()]
    data = {name: values(heads[name]) for name in columns}
    return {
        "labels": head_labels(heads),
        "grids": list(names.values()),
        "grid": [list(names).index(grid) for grid in grids(heads)],
        "layer": [layer for _, _, layer, _ in keys],
        "head": [head for _, _, _, head in keys],
        "nearest": _nearest(heads, order),
        "columns": [
            {**_column(name, tables.glossary), "numeric": _is_numeric(data[name], name)}
            for name in columns
        ],
        "values": {name: rounded(column, 6) for name, column in data.items()},
        "intervals": _intervals(tables.intervals, order),
        "pairs": _pairs(tables.similarity, order, tables.glossary),
    }


def _column(name: str, glossary: pd.DataFrame) -> dict[str, Any]:
    entry = describe(name, glossary)
    return {key: entry[key] for key in ("name", "title", "unit", "low", "high")}


def _is_numeric(column: list[Any], name: str) -> bool:
    present = [value for value in column if value is not None]
    return name not in _LABELS and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in present
    )


def _nearest(heads: pd.DataFrame, order: dict[HeadKey, int]) -> list[int | None]:
    """Return the position of each head's nearest head, None where there is none."""
    nearest: list[int | None] = [None] * len(heads)
    if not set(NEAREST) <= set(heads.columns):
        return nearest
    found = heads[list(NEAREST)].reset_index(drop=True)
    found = found[found["nearest_head"].notna()].rename(columns=lambda c: c.replace("nearest_", ""))
    for position, key in zip(found.index, head_keys(found), strict=True):
        nearest[position] = order.get(key)
    return nearest


def _intervals(table: pd.DataFrame, order: dict[HeadKey, int]) -> dict[str, dict[str, list[Any]]]:
    """Return low, high and reliability per statistic, each a list with a place per head."""
    intervals: dict[str, dict[str, list[Any]]] = {}
    fields = ("low", "high", "reliability")
    columns = [rounded(values(table[field]), 4) for field in fields]
    for key, name, *figures in zip(
        head_keys(table), values(table["statistic"]), *columns, strict=True
    ):
        if key in order:
            lists = intervals.setdefault(name, {f: [None] * len(order) for f in fields})
            for field, figure in zip(fields, figures, strict=True):
                lists[field][order[key]] = figure
    return intervals


def _pairs(
    table: pd.DataFrame, order: dict[HeadKey, int], glossary: pd.DataFrame
) -> dict[str, Any]:
    """Pack the pairs' measures as 16-bit steps between a low and a high.

    Pairs a < b stand in the order (0, 1), (0, 2) ... (1, 2) ... Where few of a model's pairs
    were measured, `positions` says which those are.
    """
    a = np.array([order.get(key, -1) for key in head_keys(table, "_a")], dtype=np.int64)
    b = np.array([order.get(key, -1) for key in head_keys(table, "_b")], dtype=np.int64)
    known = (a >= 0) & (b >= 0) & (a != b)
    first, second, count = np.minimum(a, b)[known], np.maximum(a, b)[known], len(order)
    positions = first * (2 * count - first - 1) // 2 + second - first - 1
    size = count * (count - 1) // 2
    sparse = 3 * len(positions) < size
    measures = []
    for name in MEASURES:
        if name in table and table[name].notna().any():
            numbers = table[name].to_numpy(dtype=np.float64, na_value=np.nan)[known]
            places = np.full(len(positions) if sparse else size, np.nan)
            places[np.arange(len(positions)) if sparse else positions] = numbers
            measures.append({**_column(name, glossary), **_quantised(places)})
    packed = base64.b64encode(positions.astype("<u4").tobytes()).decode() if sparse else None
    return {"positions": packed, "measures": measures}


def _quantised(numbers: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, Any]:
    present = numbers[np.isfinite(numbers)]
    low, high = min(0.0, *present.tolist(), 0.0), max(1.0, *present.tolist(), 1.0)
    steps = np.full(len(numbers), _MISSING, dtype="<u2")
    fraction = (present - low) / (high - low)
    steps[np.isfinite(numbers)] = np.rint(fraction * (_MISSING - 1)).astype("<u2")
    return {"from": low, "to": high, "data": base64.b64encode(steps.tobytes()).decode()}
