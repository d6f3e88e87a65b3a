"""Builds report.html: one file that works offline and asks the network for nothing."""

from collections.abc import Hashable
from importlib import resources
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headprobe.report.embedded import describe, embedded
from headprobe.report.formatting import Json, plain, script_json, shown, values
from headprobe.report.tables import Tables, grid_names, grids, head_keys

# Left out of the page: two runs of the same thing must give the same page.
_OF_ONE_RUN = {"command", "started", "finished", "duration", "device_host", "host", "out"}

Facts = list[tuple[str, str]]
Row = dict[Hashable, Any]


def page(tables: Tables) -> str:
    """Return the page of a run; it depends on the tables alone, not on time, place or machine."""
    environment = Environment(
        loader=PackageLoader("headprobe", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shown"] = shown
    data = embedded(tables)
    return environment.get_template("report.html.jinja").render(
        style=_piece("report.css"),
        script=_piece("report.js"),
        data=script_json(data),
        streams=data["grids"],
        flag_counts=_counts(tables.flags),
        heads=_heads_table(tables, data),
        layers=_layers_table(tables),
        groups=_groups(tables),
        flags=_flags(tables),
        advice=tables.advice,
        glossary=[describe(name, tables.glossary) for name in values(tables.glossary["name"])],
        **_summary(tables.summary),
    )


def _piece(name: str) -> Markup:
    """Return a part of the page that is ours and holds no data, so needs no escaping."""
    return Markup(resources.files("headprobe.report").joinpath(name).read_text(encoding="utf-8"))


def _summary(summary: dict[str, Any]) -> dict[str, Any]:
    summary = {key: value for key, value in plain(summary).items() if key not in _OF_ONE_RUN}
    model = summary.get("model") or {}
    inputs = [summary.get(kind) or {} for kind in ("images", "sounds", "texts")]
    measured = {"seed": summary.get("seed"), **(summary.get("settings") or {})}
    return {
        "verdict": summary.get("verdict") or "",
        "model": model,
        "model_facts": _facts(model),
        "texts": [
            fact
            for one in inputs
            for fact in _facts(
                {k: v for k, v in one.items() if not isinstance(v, str) or "hash" in k}
            )
        ],
        "settings": _facts({k: v for k, v in measured.items() if v is not None}),
        "versions": _facts(summary.get("versions") or {}),
        "capture": _listing(summary.get("layers") or []),
        "left_out": _listing(summary.get("left_out") or []),
    }


def _facts(mapping: dict[str, Any], prefix: str = "") -> Facts:
    """Flatten a mapping to (name, value as shown)."""
    facts: Facts = []
    for key, value in mapping.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if key in _OF_ONE_RUN:
            continue
        if isinstance(value, dict):
            facts += _facts(value, f"{name}: ")
        else:
            facts.append((name, "not set" if value is None else shown(value)))
    return facts


def _listing(items: Json) -> dict[str, Any]:
    """Return a list of mappings as a table, a list of anything else as lines."""
    if isinstance(items, dict):
        items = [{"name": key, "value": value} for key, value in items.items()]
    if not items or not all(isinstance(item, dict) for item in items):
        return {"columns": [], "rows": [], "lines": [shown(item) for item in items]}
    columns = [key for key in dict.fromkeys(k for i in items for k in i) if key not in _OF_ONE_RUN]
    rows = [[shown(item.get(column)) for column in columns] for item in items]
    return {"columns": [c.replace("_", " ") for c in columns], "rows": rows, "lines": []}


def _counts(flags: pd.DataFrame) -> list[tuple[str, int]]:
    """Return how many heads carry each flag, in order of appearance."""
    names = values(flags["flag"])
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _heads_table(tables: Tables, data: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the heads table and its cells, one list per head."""
    columns = [
        {**describe(column["name"], tables.glossary), "numeric": column["numeric"]}
        for column in data["columns"]
    ]
    cells = [[shown(value) for value in data["values"][column["name"]]] for column in columns]
    labels = data["labels"]
    return {
        "columns": columns,
        "rows": list(zip(*cells, strict=True)) if cells else [()] * len(labels),
        "labels": labels,
        "nearest": data["nearest"],
    }


def _layers_table(tables: Tables) -> dict[str, Any]:
    """Return the layers as they are in layers.csv, without columns that say nothing."""
    layers = tables.layers
    one_grid = len(set(grids(layers))) < 2
    names = [
        str(name)
        for name in layers
        if layers[name].notna().any() and not (one_grid and name in ("kind", "stack"))
    ]
    columns = [describe(name, tables.glossary) for name in names]
    cells = [values(layers[name]) for name in names]
    return {"columns": columns, "rows": list(zip(*cells, strict=True))}


def _groups(tables: Tables) -> list[Row]:
    """Return the groups of similar heads, their members as positions in the table of heads."""
    groups, names = tables.groups, grid_names(tables.heads)
    if groups.empty:
        return []
    order = {key: i for i, key in enumerate(head_keys(tables.heads))}
    rows = []
    for grid, row in zip(grids(groups), groups.to_dict("records"), strict=True):
        layer = int(row["layer"])
        members = [int(head) for head in str(row["heads"]).split(";")]
        members_at = [order[(*grid, layer, head)] for head in members]
        chosen = order.get((*grid, layer, int(row["representative"])))
        rows.append({**row, "name": names[grid], "members": members_at, "chosen": chosen})
    return rows


def _flags(tables: Tables) -> list[Row]:
    """Return the flags, each with its head's position in the table of heads."""
    if tables.flags.empty:
        return []
    order = {key: i for i, key in enumerate(head_keys(tables.heads))}
    rows = zip(head_keys(tables.flags), tables.flags.to_dict("records"), strict=True)
    return [{**row, "position": order[key]} for key, row in rows]
