"""Where a head puts its attention: distances, neighbours, the first key, classes of tokens."""

from __future__ import annotations

from typing import final

from torch import Tensor

from headprobe.statistics.base import Rows, Statistic

SINK_THRESHOLD = 0.3
SINK_MIN_TOKENS = 16


def _is_measured(rows: Rows) -> bool:
    return rows.self_attention and rows.has_distance


@final
class Distance(Statistic):
    """Mean over rows of sum_j A_ij |i - j|."""

    name = "distance"
    title = "Mean attention distance"
    unit = "tokens"
    low, high = 0.0, None
    definition = (
        "Mean over query rows of Σ_j A_ij |i − j|. Of pictures and sound, |i − j| is the distance "
        "between the centres of patches (Euclidean, in pixels) or of frames; A_i is renormalised "
        "over the keys that lie somewhere, without [CLS] and registers, and their rows and rows "
        "with less than 5 % on such keys are skipped. Empty for cross-attention, and where it is "
        "not known where the positions lie (`no_distance` in summary.json)."
    )
    source = "Vig & Belinkov 2019; Dosovitskiy et al. 2021, appendix D.7 (pixels)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return (rows.distance, rows.has_distances) if _is_measured(rows) else None


@final
class DistanceUnnormalized(Statistic):
    """Distance in pixels without renormalising over the patches."""

    name = "distance_unnormalized"
    title = "Mean attention distance, not renormalised"
    unit = "pixels"
    low, high = 0.0, None
    definition = (
        "Mean over the patches of Σ_j A_ij d_ij over the other patches, d in pixels; what goes to "
        "[CLS] and registers counts as distance 0. For comparison with published figures; it falls "
        "when a head attends to [CLS]. Empty where positions are no patches of a picture."
    )
    source = "Dosovitskiy et al. 2021, appendix D.7, as in the code of keras-io"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        if not _is_measured(rows) or rows.coordinates is None or rows.coordinates.shape[-1] < 2:
            return None
        return rows.distance_total, rows.from_place


@final
class DistanceRatio(Statistic):
    """Distance over that of a uniform head on the same rows."""

    name = "distance_ratio"
    title = "Distance ratio"
    unit = "1 = a uniform head"
    low, high = 0.0, None
    definition = (
        "Sum of the rows' mean distances over the same sum for a head that attends uniformly to "
        "what the row may see; rows that see one key are skipped. Empty where distance is."
    )
    source = "headprobe; makes causal and bidirectional heads, short and long texts comparable"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        if not _is_measured(rows):
            return None
        return rows.distance, rows.uniform_distance * (rows.has_choice & rows.has_distances)


@final
class Previous(Statistic):
    """Mean mass on the token before."""

    name = "previous"
    title = "Mass on the previous token"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = (
        "Mean of A_i,i−1 over the rows that have a token before. Empty for cross-attention and "
        "patches."
    )
    source = "Clark et al. 2019, section 3.1 (there over all rows); Olsson et al. 2022"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return rows.offset(-1) if rows.self_attention and rows.is_line else None


@final
class Current(Statistic):
    """Mean mass on the token itself."""

    name = "current"
    title = "Mass on the token itself"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = "Mean of A_i,i. Empty for cross-attention."
    source = "Clark et al. 2019, section 3.1"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return rows.offset(0) if rows.self_attention else None


@final
class Next(Statistic):
    """Mean mass on the token after."""

    name = "next"
    title = "Mass on the next token"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = (
        "Mean of A_i,i+1 over the rows that have a token after (0 in a causal head, which may not "
        "see it). Empty for cross-attention and patches."
    )
    source = "Clark et al. 2019, section 3.1 (there over all rows)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return rows.offset(1) if rows.self_attention and rows.is_line else None


@final
class First(Statistic):
    """Mean mass on the first key."""

    name = "first"
    title = "Mass on the first key"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = "Mean over query rows of the weight on the text's first key."
    source = "Gu et al. 2024 (α_1)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        return rows.masses["first"], rows.valid


@final
class Special(Statistic):
    """Mean mass on special tokens."""

    name = "special"
    title = "Mass on special tokens"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = (
        "Mean over query rows of the weight on all of the tokenizer's special tokens; for pictures "
        "and sound on the positions that lie nowhere in them ([CLS], registers). Empty if none "
        "occurs."
    )
    source = "Clark et al. 2019, section 3.2"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return (rows.masses["special"], rows.valid) if "special" in rows.classes else None


@final
class Punctuation(Statistic):
    """Mean mass on punctuation."""

    name = "punctuation"
    title = "Mass on punctuation"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = (
        "Mean over query rows of the weight on tokens of punctuation and symbols only (Unicode "
        "categories P and S); empty if none occurs."
    )
    source = "Clark et al. 2019, section 3.2"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return (rows.masses["punctuation"], rows.valid) if "punctuation" in rows.classes else None


@final
class Sink(Statistic):
    """Share of texts in which the head attends mostly to the first key."""

    name = "sink"
    title = "Sink rate"
    unit = "fraction of texts"
    low, high = 0.0, 1.0
    definition = (
        f"Share of the texts of at least {SINK_MIN_TOKENS} tokens whose mean weight on the first "
        f"key is above {SINK_THRESHOLD}."
    )
    source = "Gu et al. 2024 (Sink_1^ε with ε = 0.3, per text as in their code)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor]:  # noqa: D102
        return rows.masses["first"], rows.valid

    def in_blocks(self, block: Tensor, tokens: Tensor) -> Sink:
        """One vote per text, added up by block."""
        counts = (tokens >= SINK_MIN_TOKENS)[:, None] & (self.count > 0)
        is_sink = counts & (self.total / self.count.clamp_min(1) > SINK_THRESHOLD)
        votes = Sink(is_sink.double(), counts.double())
        return Statistic.in_blocks(votes, block, tokens)


@final
class Missing(Statistic):
    """Mean mass on no key: what goes to a learned sink."""

    name = "missing"
    title = "Mass on no key"
    unit = "fraction of attention"
    low, high = 0.0, 1.0
    definition = (
        "Mean over query rows of 1 − Σ_j A_ij: what goes to learned sinks, learned keys or zeros "
        "instead of the text. Other masses and distances are of the whole attention, not of what "
        "is left of it. Empty where rows sum to 1 by construction."
    )
    source = "Xiao et al. 2024 (a learned sink takes what attends to nothing)"

    @staticmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:  # noqa: D102
        return (rows.missing, rows.valid) if rows.sink else None
