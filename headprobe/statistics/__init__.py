"""Figures of attention heads, as sums that merge: `+` adds texts, batches, ranks and machines."""

from headprobe.statistics.base import BLOCKS, Rows, Statistic, entropy, with_missing_mass
from headprobe.statistics.output import OutputNorm
from headprobe.statistics.places import (
    Current,
    Distance,
    DistanceRatio,
    DistanceUnnormalized,
    First,
    Missing,
    Next,
    Previous,
    Punctuation,
    Sink,
    Special,
)
from headprobe.statistics.similarity import (
    MEASURES,
    PairSums,
    js_divergence,
    pair_similarities,
    total_variation,
)
from headprobe.statistics.spread import (
    Confidence,
    EffectiveSupport,
    Entropy,
    EntropyNormalized,
    GeneralizedJS,
)

STATISTICS: tuple[type[Statistic], ...] = (
    Entropy,
    EntropyNormalized,
    Confidence,
    EffectiveSupport,
    Distance,
    DistanceRatio,
    Previous,
    Current,
    Next,
    First,
    Special,
    Punctuation,
    Sink,
    OutputNorm,
    Missing,
    DistanceUnnormalized,
)
"""The statistics per head, in the order of the columns of heads.csv, new ones at its end."""

LAYER_STATISTICS: tuple[type[Statistic], ...] = (GeneralizedJS,)
"""The statistics per layer."""

__all__ = [
    "BLOCKS",
    "LAYER_STATISTICS",
    "MEASURES",
    "STATISTICS",
    "Distance",
    "OutputNorm",
    "PairSums",
    "Rows",
    "Statistic",
    "entropy",
    "js_divergence",
    "pair_similarities",
    "total_variation",
    "with_missing_mass",
]
