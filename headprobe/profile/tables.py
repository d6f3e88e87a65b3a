"""A profile as tables: the columns of heads.csv, similarity.csv, layers.csv and intervals.csv."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd

from headprobe.profile.sums import Address, Layer, Profile
from headprobe.statistics import MEASURES, STATISTICS, Distance, OutputNorm, Statistic

HEAD_KEY = ("kind", "stack", "layer", "head")
"""The columns that name a head."""

_LATER_MEASURES = ("cka", "output_cosine", "js_null", "js_no_sink")
_LAYER_COLUMNS = (
    *("kind", "stack", "layer", "heads", "entropy_mean", "entropy_normalized_mean"),
    *("distance_mean", "js_similarity_mean", "generalized_js"),
)
_RESAMPLES = 999
_CONFIDENCE = 0.95


def heads(profile: Profile) -> pd.DataFrame:
    """A row per head: its key, site and key-value group, its nearest head, every statistic."""
    names = [statistic.name for statistic in STATISTICS]
    rows = [
        {
            **key,
            "site": layer.site,
            "kv_group": layer.kv_heads and key["head"] * layer.kv_heads // layer.heads,
            **{name: values[name][key["head"]] for name in names},
            "distance_unit": layer.distance_unit,
        }
        for layer, keys in zip(profile.measured, _keys(profile), strict=True)
        for values in [{name: _values(profile, layer, name) for name in names}]
        for key in keys
    ]
    table = pd.DataFrame(rows, columns=[*HEAD_KEY, "site", "kv_group", *names, "distance_unit"])
    table = table.astype({"kv_group": "Int64"})  # missing where only maps were given
    # Columns keep their places: what was thought of later comes at the end.
    later = [*names[STATISTICS.index(OutputNorm) + 1 :], "distance_unit"]
    return pd.concat([table.drop(columns=later), _nearest(profile, table), table[later]], axis=1)


def pairs(profile: Profile) -> pd.DataFrame:
    """A row per pair of heads, first before second: its measures of similarity.

    Pairs whose heads see other keys, or were left out of the choice, have empty cells.
    """
    keys = dict(zip((layer.address for layer in profile.measured), _keys(profile), strict=True))
    order = list(keys)
    frames = [
        _pair_frame(profile, keys, first, second)
        for i, first in enumerate(order)
        for second in order[i:]
        if (first, second) in profile.pair_sums or len(profile.pair_sums) < _FEW_LAYER_PAIRS
    ]
    columns = [f"{name}_{side}" for side in "ab" for name in HEAD_KEY]
    if not frames:
        return pd.DataFrame(columns=[*columns, *MEASURES, *_LATER_MEASURES])
    table = pd.concat(frames, ignore_index=True)
    return table.assign(**dict.fromkeys(_LATER_MEASURES, np.nan))


def layers(profile: Profile) -> pd.DataFrame:
    """A row per layer: means over its heads, and the statistics of the layer."""
    rows = []
    for layer, keys in zip(profile.measured, _keys(profile), strict=True):
        similarity = _similarity(profile, layer.address, layer.address)
        upper = np.triu_indices(layer.heads, k=1)
        rows.append(
            {
                **{name: keys[0][name] for name in ("kind", "stack", "layer")},
                "heads": layer.heads,
                "entropy_mean": _mean(_values(profile, layer, "entropy")),
                "entropy_normalized_mean": _mean(_values(profile, layer, "entropy_normalized")),
                "distance_mean": _mean(_values(profile, layer, "distance")),
                "js_similarity_mean": _mean(similarity[0][upper]),
                "generalized_js": _values(profile, layer, "generalized_js")[0],
            }
        )
    return pd.DataFrame(rows, columns=list(_LAYER_COLUMNS))


def intervals(profile: Profile) -> pd.DataFrame:
    """A row per head and statistic: a 95 % bootstrap interval over the resampling blocks."""
    frames = []
    for layer, keys in zip(profile.measured, _keys(profile), strict=True):
        for statistic in STATISTICS:
            values = _values(profile, layer, statistic.name)
            if not np.isfinite(values).any():
                continue
            low, high = _interval(layer.statistics[statistic.name], int(profile.settings["seed"]))
            frames.append(
                pd.DataFrame(keys).assign(
                    statistic=statistic.name, value=values, low=low, high=high, reliability=np.nan
                )
            )
    columns = [*HEAD_KEY, "statistic", "value", "low", "high", "reliability"]
    if not frames:
        return pd.DataFrame(columns=columns)
    return pd.concat(frames, ignore_index=True)[columns]


def glossary(distance_units: Collection[str] = ()) -> pd.DataFrame:
    """A row per statistic: its name, title, unit, range, definition and source.

    Args:
        distance_units: the units of the layers' distances, "" for none; tokens if not given.
    """
    from headprobe.statistics import LAYER_STATISTICS

    columns = ("name", "title", "unit", "low", "high", "definition", "source")
    described = [
        {column: getattr(statistic, column) for column in columns}
        for statistic in (*STATISTICS, *LAYER_STATISTICS)
    ]
    units = " or ".join(sorted(set(distance_units) - {""}))
    for statistic in described:
        if statistic["name"] == Distance.name and units:
            statistic["unit"] = units
    return pd.DataFrame([*described, *_MEASURES_DESCRIBED], columns=list(columns))


def _keys(profile: Profile) -> list[list[dict[str, Any]]]:
    """The key of each head of each layer."""
    return [
        [
            {"kind": layer.kind, "stack": place.stack, "layer": place.layer, "head": head}
            for head in range(layer.heads)
        ]
        for layer, place in zip(profile.measured, profile.places(), strict=True)
    ]


def _values(profile: Profile, layer: Layer, name: str) -> np.ndarray[Any, Any]:
    """The figure of each head of a layer; NaN where it was not measured."""
    statistic = layer.statistics.get(name)
    # A token class that doesn't occur among the keys has no mass to measure.
    if statistic is None or _class_tokens(profile, layer, name) == 0:
        return np.full(layer.heads, np.nan)
    return np.asarray(statistic.value().numpy())


def _class_tokens(profile: Profile, layer: Layer, name: str) -> int | None:
    """How many tokens of a class the layer's keys may be, or None if `name` is no class."""
    return profile.class_tokens.get(layer.streams[1] or "", {}).get(name)


def _similarity(profile: Profile, first: Address, second: Address) -> np.ndarray[Any, Any]:
    """[measures, heads_a, heads_b]; NaN where it was not measured."""
    sums = profile.pair_sums.get((first, second))
    if sums is None:
        heads_of = {layer.address: layer.heads for layer in profile.measured}
        return np.full((len(MEASURES), heads_of[first], heads_of[second]), np.nan)
    return np.asarray(sums.value().numpy())


def _pair_frame(
    profile: Profile,
    keys: dict[Address, list[dict[str, Any]]],
    first: Address,
    second: Address,
) -> pd.DataFrame:
    similarity = _similarity(profile, first, second)
    if first == second:
        a, b = np.triu_indices(similarity.shape[1], k=1)
    else:
        a, b = (index.ravel() for index in np.indices(similarity.shape[1:]))
    sides = [
        pd.DataFrame(keys[address]).iloc[index].add_suffix(suffix).reset_index(drop=True)
        for address, index, suffix in ((first, a, "_a"), (second, b, "_b"))
    ]
    measures = pd.DataFrame(similarity[:, a, b].T, columns=list(MEASURES))
    return pd.concat([*sides, measures], axis=1)


def _nearest(profile: Profile, table: pd.DataFrame) -> pd.DataFrame:
    """Each head's most similar head in any layer, by Jensen-Shannon similarity."""
    starts, total = {}, 0
    for layer in profile.measured:
        starts[layer.address] = total
        total += layer.heads
    best, best_head = np.full(total, -np.inf), np.full(total, -1)
    for (first, second), sums in profile.pair_sums.items():
        matrix = sums.value().numpy()[0].copy()
        if first == second:
            np.fill_diagonal(matrix, np.nan)
        for values, rows, columns in ((matrix, first, second), (matrix.T, second, first)):
            filled = np.where(np.isnan(values), -np.inf, values)
            some = slice(starts[rows], starts[rows] + filled.shape[0])
            better = filled.max(axis=1) > best[some]
            best_head[some][better] = starts[columns] + filled.argmax(axis=1)[better]
            best[some][better] = filled.max(axis=1)[better]
    known = best_head >= 0
    near = table[list(HEAD_KEY)].iloc[np.where(known, best_head, 0)].reset_index(drop=True)
    near = near.astype({"layer": "Int64", "head": "Int64"})
    near.loc[~known] = pd.NA
    return near.add_prefix("nearest_").assign(nearest_similarity=np.where(known, best, np.nan))


def _interval(sums: Statistic, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Percentile interval of each head's figure, the resampling blocks drawn with replacement."""
    occupied = (sums.count.sum(dim=1) > 0).numpy()
    total, count = sums.total.numpy()[occupied], sums.count.numpy()[occupied]
    n = len(total)
    if n < 2:
        return np.full(total.shape[1], np.nan), np.full(total.shape[1], np.nan)
    # How often each block is drawn: the resampled sums are then one product of matrices.
    times = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES)
    figures = (times @ total) / (times @ count)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(figures, [tail, 1 - tail], axis=0)
    return low, high


def _mean(values: np.ndarray[Any, Any]) -> float:
    return float(values.mean()) if len(values) else float("nan")


_FEW_LAYER_PAIRS = 10_000

_MEASURES_DESCRIBED: list[dict[str, Any]] = [
    {
        "name": "js_similarity",
        "title": "Jensen–Shannon similarity",
        "unit": "1 = the same rows",
        "low": 0.0,
        "high": 1.0,
        "definition": "Mean over query rows of 1 − JS(A_i^a, A_i^b) / ln 2; rows that see one key "
        "are skipped.",
        "source": "Lin 1991; between heads Clark et al. 2019",
    },
    {
        "name": "overlap",
        "title": "Overlap",
        "unit": "1 = the same rows",
        "low": 0.0,
        "high": 1.0,
        "definition": "Mean over query rows of 1 − ½ Σ_j |A_ij^a − A_ij^b| (1 − total variation); "
        "rows that see one key are skipped.",
        "source": "Bhojanapalli et al. 2021",
    },
    {
        "name": "cosine",
        "title": "Cosine",
        "unit": "1 = the same direction",
        "low": 0.0,
        "high": 1.0,
        "definition": "Mean over query rows of the cosine of A_i^a and A_i^b; rows that see one "
        "key are skipped.",
        "source": "Kovaleva et al. 2019 (there of flattened maps)",
    },
]
