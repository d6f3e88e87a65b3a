"""Compares the heads of layers on the rows that were sampled for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headprobe.capture import AttentionCall, Block
from headprobe.profile.sums import Address
from headprobe.statistics import PairSums, with_missing_mass

if TYPE_CHECKING:
    from headprobe.profile.run import Sampling

ROWS_AT_ONCE = 16
"""Rows per text on which heads are compared at a time."""


@dataclass(frozen=True, eq=False)
class Compared:
    """The rows of one layer on which its heads are compared with others.

    Attributes:
        address: which call of which module this is.
        heads: number of heads.
        axes: the streams and lengths of queries and keys, and which positions they are; heads of
            unlike ones have no similarity.
        blocks: the resampling block of each sequence.
        sink: whether part of the attention may go to no key.
        source: the weights of these rows, or the call to rebuild them from when they are needed.
        index: the sampled rows, [batch, rows].
        real: False for repetitions that fill up the array, [batch, rows].
        key_valid: False for padding, [batch, keys].
    """

    address: Address
    heads: int
    axes: tuple[str | None, str | None, int, int, str]
    blocks: list[int]
    sink: bool
    source: Block | AttentionCall
    index: Tensor
    real: Tensor
    key_valid: Tensor

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Weights, [batch, heads, rows, keys], and whether a row is real and has a choice."""
        some = slice(start, stop)
        if isinstance(self.source, AttentionCall):
            block = self.source.at(self.index[:, some])
            weights, visible = block.weights, block.visible
        else:
            weights, visible = self.source.weights[:, :, some], self.source.visible
            visible = visible[:, :, some] if visible.shape[2] > 1 else visible
        seen = (visible & self.key_valid[:, None, None]).sum(dim=-1).amin(dim=1)
        return weights, self.real[:, some] & (seen >= 2)


def compare(
    layers: Sequence[Compared], sampling: Sampling
) -> dict[tuple[Address, Address], PairSums]:
    """The similarity of all heads whose rows can be compared, as sums.

    Args:
        layers: the layers of one forward pass.
        sampling: how many pairs, and how many rows across layers.
    """
    panels: dict[Any, list[Compared]] = defaultdict(list)
    for layer in layers:
        panels[layer.axes].append(layer)
    chosen = _choose(list(panels.values()), sampling)
    sums: dict[tuple[Address, Address], PairSums] = {}
    for panel in panels.values():
        for key, texts in _panel(panel, chosen, sampling.rows_across):
            measured = PairSums.of(texts, panel[0].blocks)
            sums[key] = sums[key] + measured if key in sums else measured
    return sums


def _panel(
    panel: list[Compared], chosen: set[tuple[Address, Address]], across: int | None
) -> Iterator[tuple[tuple[Address, Address], list[tuple[Tensor, Tensor]]]]:
    """The rows of all chosen pairs of layers of a panel, text by text, some rows at a time."""
    sink = any(layer.sink for layer in panel)
    for start in range(0, panel[0].index.shape[1], ROWS_AT_ONCE):
        rows = {c.address: c.rows(start, start + ROWS_AT_ONCE) for c in panel}
        for first, second in combinations_with_replacement(panel, 2):
            key = (first.address, second.address)
            if key not in chosen:
                continue
            a, real_a = rows[first.address]
            b, real_b = (side.to(a.device) for side in rows[second.address])
            both = real_a & real_b
            if first is not second and across is not None:
                both = both & (torch.arange(both.shape[1], device=both.device) + start < across)
            texts = [
                (a[text][:, both[text]][..., keys], b[text][:, both[text]][..., keys])
                for text, keys in enumerate(first.key_valid)
            ]
            if sink:  # what goes to no key is one more place to look at
                texts = [(with_missing_mass(one), with_missing_mass(two)) for one, two in texts]
            yield key, texts


def _choose(panels: list[list[Compared]], sampling: Sampling) -> set[tuple[Address, Address]]:
    """All pairs within layers; across layers all, or a seeded choice that keeps to the limit."""
    within = [c for panel in panels for c in panel]
    across = [(a, b) for panel in panels for i, a in enumerate(panel) for b in panel[i + 1 :]]
    left = sampling.pairs - sum(c.heads * (c.heads - 1) // 2 for c in within)
    chosen = {(c.address, c.address) for c in within}
    if sum(a.heads * b.heads for a, b in across) > left:
        order = np.random.default_rng(sampling.seed).permutation(len(across))
        across = [across[int(i)] for i in order]
    for a, b in across:
        left -= a.heads * b.heads
        if left < 0:
            break
        chosen.add((a.address, b.address))
    return chosen
