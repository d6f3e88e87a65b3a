"""How widely a head spreads its attention."""

from __future__ import annotations

from typing import final

from torch import Tensor

from headprobe.statistics.base import Rows, Statistic, entropy


@final
class Entropy(Statistic):
    """Mean over rows of H_i = -sum_j A_ij ln A_ij."""

    name = "entropy"
    title = "Entropy"
    unit = "nats"
    low, high = 0.0, None
    definition = (
        "Mean over query rows of H_i = −Σ_j A_ij ln A_ij, with 0 ln 0 = 0; at most ln n_i for a "
        "row that may see n_i keys. Rows that see one key count, with 0. Where rows sum to less "
        "than 1 (`missing`), the mass on no key is one more outcome, here and in every figure "
        "made of entropies or of two heads' rows."
    )
    source = "Clark et al. 2019 (there smoothed; here exact)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        return rows.entropy, rows.valid


@final
class EntropyNormalized(Statistic):
    """Mean over rows of H_i / ln n_i."""

    name = "entropy_normalized"
    title = "Normalised entropy"
    unit = "fraction of the largest possible entropy"
    low, high = 0.0, 1.0
    definition = (
        "Mean over query rows of H_i / ln n_i, where n_i is the number of keys that the row may "
        "see (one more with a learned sink); rows that see one key are skipped. 1 is a uniform "
        "head, causal or not."
    )
    source = (
        "headprobe; normalised per row because ln S is out of reach for the rows of a causal map"
    )

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        return rows.entropy / rows.largest_entropy, rows.has_choice


@final
class EffectiveSupport(Statistic):
    """Mean over rows of exp(H_i)."""

    name = "effective_support"
    title = "Effective support"
    unit = "keys"
    low, high = 1.0, None
    definition = (
        "Mean over query rows of exp(H_i): over how many keys the row spreads its attention."
    )
    source = "Hill 1973 (number of order 1)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        return rows.entropy.exp(), rows.valid


@final
class Confidence(Statistic):
    """Mean over rows of the largest weight."""

    name = "confidence"
    title = "Confidence"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = "Mean over query rows of max_j A_ij, over all keys, special tokens included."
    source = "Voita et al. 2019 (there without the end-of-sentence key)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        return rows.largest, rows.valid


@final
class GeneralizedJS(Statistic):
    """Generalised Jensen-Shannon divergence of a layer's heads: one figure per layer."""

    name = "generalized_js"
    title = "Generalised Jensen-Shannon divergence"
    unit = "nats"
    low, high = 0.0, None
    definition = (
        "Mean over query rows of H(mean of the heads' weights) − mean of the heads' entropies; 0 "
        "if all heads of the layer agree, at most ln(heads). Rows that see one key are skipped."
    )
    source = "Lin 1991; as head diversity Correia et al. 2019"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        mixed = entropy(rows.distributions.mean(dim=1, keepdim=True))
        spread = mixed - rows.entropy.mean(dim=1, keepdim=True)
        return spread.clamp_min(0.0), rows.has_choice.all(dim=1, keepdim=True)
