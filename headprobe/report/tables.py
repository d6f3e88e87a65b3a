"""What a report is made of, and how its heads are named."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

HeadKey = tuple[str, str, int, int]


@dataclass(frozen=True)
class Tables:
    """The finished results of a run.

    Heads are told apart by `kind`, `stack`, `layer` and `head`; layers and heads count from 0.
    A figure that was not measured is missing (NaN, None or NA), never 0.

    Attributes:
        heads: A row per head; identity columns, then a column per statistic.
        similarity: A row per pair of heads; identity columns end in `_a` and `_b`.
        layers: A row per layer.
        intervals: A row per head and statistic: `statistic, value, low, high, reliability`.
        groups: A row per group of similar heads of a layer; `heads` is like "2;5". May be empty.
        flags: A row per flag: `flag, value, threshold, evidence`; the evidence is a sentence.
        advice: Sentences for the reader.
        glossary: A row per statistic: `name, title, unit, low, high, definition, source`.
        summary: The content of summary.json: verdict, model, texts, settings, versions ...
    """

    heads: pd.DataFrame
    similarity: pd.DataFrame
    layers: pd.DataFrame
    intervals: pd.DataFrame
    groups: pd.DataFrame
    flags: pd.DataFrame
    advice: list[str]
    glossary: pd.DataFrame
    summary: dict[str, Any]


def grids(table: pd.DataFrame, suffix: str = "") -> list[tuple[str, str]]:
    """Return each row's (kind, stack); a missing one is the empty string."""
    kinds, stacks = (
        [
            "" if missing else str(value)
            for value, missing in zip(column, column.isna(), strict=True)
        ]
        for column in (table[f"kind{suffix}"], table[f"stack{suffix}"])
    )
    return list(zip(kinds, stacks, strict=True))


def head_keys(table: pd.DataFrame, suffix: str = "") -> list[HeadKey]:
    """Return each row's (kind, stack, layer, head)."""
    layers, heads = table[f"layer{suffix}"], table[f"head{suffix}"]
    return [
        (kind, stack, int(layer), int(head))
        for (kind, stack), layer, head in zip(grids(table, suffix), layers, heads, strict=True)
    ]


def grid_names(heads: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Name each (kind, stack) of a table of heads, in order of appearance.

    A name says no more than is needed to tell them apart: nothing where there is only one, the
    stack where it has one kind of attention, else both.
    """
    found = list(dict.fromkeys(grids(heads)))
    if len(found) == 1:
        return {found[0]: ""}
    stacks = [stack for _, stack in found]
    return {
        (kind, stack): stack if stack and stacks.count(stack) == 1 else f"{stack} {kind}".strip()
        for kind, stack in found
    }
