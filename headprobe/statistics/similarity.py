"""How alike two heads look: per query row, then averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from headprobe.statistics.base import BLOCKS, entropy

MEASURES = ("js_similarity", "overlap", "cosine")
"""The measures of similarity, in the order of `PairSums.total`."""


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of the last axis, H((p + q)/2) - (H(p) + H(q))/2.

    Args:
        p: distributions, [..., keys].
        q: distributions, broadcasts to p.

    Returns:
        Divergence in nats, 0 (the same) to ln 2 (nothing in common), [...].

    Example:
        >>> js_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
        tensor(0.2158)

    Reference:
        Lin (1991), "Divergence Measures Based on the Shannon Entropy".
    """
    return (entropy((p + q).mul_(0.5)) - (entropy(p) + entropy(q)) / 2).clamp(0.0, log(2))


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Total variation distance of the last axis, half the sum of |p - q|.

    Args:
        p: distributions, [..., keys].
        q: distributions, broadcasts to p.

    Returns:
        0 (the same) to 1 (nothing in common), [...].
    """
    return (p - q).abs().sum(dim=-1) / 2


def pair_similarities(first: Tensor, second: Tensor) -> Tensor:
    """Every measure for every pair of heads, row by row.

    `js_similarity` is 1 - JS/ln 2, `overlap` is 1 - total variation (Bhojanapalli et al. 2021),
    `cosine` the cosine of the rows. 1 means the same, 0 nothing in common.

    Args:
        first: attention weights of some heads, [rows, heads_a, keys].
        second: weights of others on the same rows and keys, [rows, heads_b, keys].

    Returns:
        [measures, rows, heads_a, heads_b], in the order of MEASURES.
    """
    js = js_divergence(first[:, :, None], second[:, None])
    overlap = (1 - torch.cdist(first, second, p=1.0) / 2).clamp_min(0.0)
    tiny = torch.finfo(first.dtype).tiny
    unit_a, unit_b = (s / s.norm(dim=-1, keepdim=True).clamp_min(tiny) for s in (first, second))
    cosine = (unit_a @ unit_b.transpose(-1, -2)).clamp_max(1.0)
    return torch.stack([1 - js / log(2), overlap, cosine])


@dataclass(frozen=True)
class PairSums:
    """The similarity of the heads of two layers (or of one), as sums over query rows.

    Attributes:
        total: sums of the measures, [BLOCKS, measures, heads_a, heads_b], float64 on the CPU.
        count: number of rows, [BLOCKS], float64 on the CPU.
    """

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, texts: Sequence[tuple[Tensor, Tensor]], blocks: Sequence[int]) -> PairSums:
        """The sums over some rows of some texts.

        Args:
            texts: for each text the attention weights of the first layer, [heads_a, rows, keys],
                and of the second on the same rows and keys, [heads_b, rows, keys].
            blocks: the resampling block of each text, 0 to BLOCKS - 1.
        """
        heads = texts[0][0].shape[0], texts[0][1].shape[0]
        total = torch.zeros(BLOCKS, len(MEASURES), *heads, dtype=torch.float64)
        count = torch.zeros(BLOCKS, dtype=torch.float64)
        for (first, second), block in zip(texts, blocks, strict=True):
            total[block] += _row_sums(first, second).cpu()
            count[block] += first.shape[1]
        return cls(total, count)

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(self.total + other.total, self.count + other.count)

    def value(self) -> Tensor:
        """Mean over rows, [measures, heads_a, heads_b]; NaN where no row counted."""
        return self.total.sum(dim=0) / self.count.sum()


def _row_sums(first: Tensor, second: Tensor) -> Tensor:
    """Every measure summed over rows, [measures, heads_a, heads_b], float64."""
    total = first.new_zeros(len(MEASURES), first.shape[0], second.shape[0], dtype=torch.float64)
    size = max(1, _LARGEST // (first.shape[0] * second.shape[0] * first.shape[2]))
    a, b = (side.transpose(0, 1).contiguous() for side in (first, second))
    for some_a, some_b in zip(a.split(size), b.split(size), strict=True):
        total += pair_similarities(some_a, some_b).sum(dim=1, dtype=torch.float64)
    return total


_LARGEST = 2**20
"""Entries of the largest array made for a pair of layers: about what stays in the cache."""
