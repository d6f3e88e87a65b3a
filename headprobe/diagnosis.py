"""From figures to findings: groups of similar heads, flags with their evidence, advice in words.

Works on tables. Similar is not redundant: whether a head can go is a matter of measuring what the
model loses without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

LAYER_KEY = ["kind", "stack", "layer"]
HEAD_KEY = [*LAYER_KEY, "head"]

DEFAULT_SIMILARITY = 0.9

# Columns of heads.csv that are measured by other commands; empty until then.
_LATER = ("importance", "importance_signed", "impact", "impact_low", "impact_high")


class Rule(NamedTuple):
    """When a head gets a flag.

    Attributes:
        flag: the flag's name.
        column: the figure that decides.
        threshold: the flag is given from this value on.
        evidence: a sentence, formatted with the head's row as `row` and the threshold.
        source: where the threshold comes from.
    """

    flag: str
    column: str
    threshold: float
    evidence: str
    source: str


RULES = (
    Rule(
        "uniform",
        "entropy_normalized",
        0.95,
        "its rows reach {value:.3f} of the largest possible entropy: it attends almost equally to "
        "everything it may see",
        "headprobe",
    ),
    Rule(
        "sink",
        "sink",
        0.5,
        "in {value:.0%} of the texts it puts more than 0.3 of its attention on the first key",
        "Gu et al. 2024 for the 0.3; half of the texts: headprobe",
    ),
    Rule(
        "copy",
        "nearest_similarity",
        0.99,
        "its rows are nearly those of another head (Jensen-Shannon similarity {value:.4f} with "
        "{nearest})",
        "headprobe",
    ),
    Rule(
        "previous",
        "previous",
        0.5,
        "it puts {value:.3f} of its attention on the previous token",
        "Clark et al. 2019 (above 0.5)",
    ),
    Rule(
        "next",
        "next",
        0.5,
        "it puts {value:.3f} of its attention on the next token",
        "Clark et al. 2019 (above 0.5)",
    ),
)
"""The flags, in the order in which a head carries them."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a model's heads.

    Attributes:
        heads: the table of heads with `group`, `roles`, `verdict` and `flags` filled in. `verdict`
            is `similar` for heads in a group; nothing is called redundant before it is measured.
        groups: a row per group of similar heads of a layer: `kind, stack, layer, group, heads`
            ("2;5"), `size, representative, similarity_mean, similarity_min`.
        flags: a row per flag of a head: `flag, value, threshold, evidence`.
        layers: the table of layers with the number of `groups`.
        verdict: a sentence.
        advice: sentences: what to look at, what to do next.
    """

    heads: pd.DataFrame
    groups: pd.DataFrame
    flags: pd.DataFrame
    layers: pd.DataFrame
    verdict: str
    advice: list[str]


def diagnose(
    heads: pd.DataFrame,
    pairs: pd.DataFrame,
    layers: pd.DataFrame,
    *,
    similarity: float = DEFAULT_SIMILARITY,
) -> Diagnosis:
    """Group the heads of each layer that look alike, and flag what stands out.

    Groups come from average linkage on 1 - Jensen-Shannon similarity, cut where the average
    similarity of two groups falls below `similarity`.

    Args:
        heads: `Profile.heads()`.
        pairs: `Profile.pairs()`.
        layers: `Profile.layers()`.
        similarity: heads are grouped from this average similarity on, in (0, 1].

    Raises:
        ValueError: if `similarity` is not in (0, 1].
    """
    if not 0 < similarity <= 1:
        raise ValueError(f"similarity is {similarity}: expected a number above 0, at most 1")
    groups = _groups(heads, pairs, similarity)
    flags = _flags(heads)
    grouped = {
        (*(row[name] for name in LAYER_KEY), int(head)): row["group"]
        for row in groups.to_dict("records")
        for head in row["heads"].split(";")
    }
    carried = flags.groupby(HEAD_KEY, sort=False)["flag"].agg(";".join).to_dict()
    keys = list(heads[HEAD_KEY].itertuples(index=False, name=None))
    in_group = pd.Series([grouped.get(key) for key in keys], index=heads.index, dtype="Int64")
    # Columns keep their places: statistics of later versions come after the verdict.
    order = list(heads.columns)
    settled = order.index("nearest_similarity") + 1 if "nearest_similarity" in order else len(order)
    diagnosed = heads[order[:settled]].assign(
        **dict.fromkeys(_LATER, np.nan),
        group=in_group,
        roles="",
        verdict=np.where(in_group.isna(), "", "similar"),
        flags=[carried.get(key, "") for key in keys],
        **heads[order[settled:]],
    )
    count = groups.groupby(LAYER_KEY, sort=False).size().to_dict()
    layer_keys = layers[LAYER_KEY].itertuples(index=False, name=None)
    return Diagnosis(
        heads=diagnosed,
        groups=groups,
        flags=flags,
        layers=layers.assign(groups=[count.get(key, 0) for key in layer_keys]),
        verdict=_verdict(diagnosed, groups, similarity),
        advice=_advice(groups, flags),
    )


def _groups(heads: pd.DataFrame, pairs: pd.DataFrame, similarity: float) -> pd.DataFrame:
    within = pairs[_same_layer(pairs)]
    by_layer = dict(list(within.groupby([f"{name}_a" for name in LAYER_KEY], sort=False)))
    rows: list[dict[str, Any]] = []
    for key, layer in heads.groupby(LAYER_KEY, sort=False):
        matrix = _matrix(by_layer.get(key), len(layer))
        if len(layer) < 2 or np.isnan(matrix).any():
            continue
        rows.extend(
            dict(zip(LAYER_KEY, key, strict=True)) | {"group": number} | group
            for number, group in enumerate(_clusters(matrix, similarity))
        )
    columns = ["group", "heads", "size", "representative", "similarity_mean", "similarity_min"]
    return pd.DataFrame(rows, columns=[*LAYER_KEY, *columns])


def _same_layer(pairs: pd.DataFrame) -> pd.Series:
    same = [pairs[f"{name}_a"] == pairs[f"{name}_b"] for name in LAYER_KEY]
    return pd.Series(np.logical_and.reduce(same), index=pairs.index)


def _matrix(pairs: pd.DataFrame | None, size: int) -> np.ndarray[Any, Any]:
    matrix = np.full((size, size), np.nan)
    np.fill_diagonal(matrix, 1.0)
    if pairs is not None:
        a, b = pairs["head_a"].to_numpy(int), pairs["head_b"].to_numpy(int)
        matrix[a, b] = matrix[b, a] = pairs["js_similarity"].to_numpy(float)
    return matrix


def _clusters(matrix: np.ndarray[Any, Any], similarity: float) -> Iterable[dict[str, Any]]:
    """The groups of two heads or more, in the order of their first heads."""
    distance = squareform(1 - matrix, checks=False).clip(min=0)
    # A hair of slack, so that a similarity of exactly the threshold counts as similar.
    labels = fcluster(linkage(distance, "average"), 1 - similarity + 1e-12, "distance")
    for label in dict.fromkeys(labels):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            continue
        among = matrix[np.ix_(members, members)]
        upper = among[np.triu_indices(len(members), k=1)]
        yield {
            "heads": ";".join(map(str, members)),
            "size": len(members),
            # The medoid: on average the most similar to the others; the first of equals.
            "representative": int(members[among.sum(axis=1).round(9).argmax()]),
            "similarity_mean": float(upper.mean()),
            "similarity_min": float(upper.min()),
        }


def _flags(heads: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {
            **{name: row[name] for name in HEAD_KEY},
            "flag": rule.flag,
            "value": row[rule.column],
            "threshold": rule.threshold,
            "evidence": rule.evidence.format(value=row[rule.column], nearest=_nearest(row)),
        }
        for row in heads.to_dict("records")
        for rule in RULES
        if row[rule.column] >= rule.threshold
    ]
    return pd.DataFrame(rows, columns=[*HEAD_KEY, "flag", "value", "threshold", "evidence"])


def _nearest(row: dict[Any, Any]) -> str:
    if pd.isna(row["nearest_layer"]):
        return "none"
    stream = " ".join(
        str(row[f"nearest_{name}"])
        for name in ("stack", "kind")
        if row[f"nearest_{name}"] != row[name]
    )
    return f"{stream} layer {row['nearest_layer']} head {row['nearest_head']}".strip()


def _verdict(heads: pd.DataFrame, groups: pd.DataFrame, similarity: float) -> str:
    alike = int(groups["size"].sum())
    if not alike:
        return (
            f"No two heads of a layer are similar (average Jensen-Shannon similarity of "
            f"{similarity:g} or more) among {len(heads)} heads."
        )
    return (
        f"{alike} of {len(heads)} heads are similar to another head of their layer, in "
        f"{len(groups)} {_plural(len(groups), 'group')} (average Jensen-Shannon similarity of "
        f"{similarity:g} or more). Whether any of them can be removed has not been measured."
    )


_ADVICE = {
    "uniform": "{heads} with almost uniform attention: in a trained model such a head averages "
    "what it sees; in training, check the 1/sqrt(d_k) scaling, the initialisation and the "
    "learning rate.",
    "sink": "{heads} resting on the first key in most texts: sinks look alike whatever they do "
    "elsewhere; compare their output norms before calling one idle.",
    "copy": "{heads} with nearly the rows of another head: the same rows can still carry different "
    "values, so the outputs of both may be needed.",
}


def _advice(groups: pd.DataFrame, flags: pd.DataFrame) -> list[str]:
    counts = flags["flag"].value_counts()
    advice = [
        words.format(heads=f"{counts[flag]} {_plural(int(counts[flag]), 'head')}")
        for flag, words in _ADVICE.items()
        if flag in counts
    ]
    if len(groups):
        largest = groups.iloc[int(groups["size"].to_numpy(int).argmax())]
        advice.insert(
            0,
            f"The largest group is heads {largest['heads'].replace(';', ', ')} of "
            f"{_layer_name(largest)}; head {largest['representative']} represents it. If heads "
            "grow alike in your own training, try more attention dropout, a different "
            "initialisation of W_Q, or fewer heads.",
        )
    return advice


def _layer_name(row: pd.Series) -> str:
    return f"{row['stack']} layer {row['layer']} ({row['kind']})".strip()


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
