"""What a statistic sees (rows of attention weights) and what it keeps (sums that merge)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

BLOCKS = 64
"""Number of resampling blocks that the sums of a profile are kept apart by."""


_LEAST_PLACE_MASS = 0.05
"""A row with less than this on places of the input has no distance: it is all on [CLS]."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some query rows of one attention call on a batch of texts, with what is known of the texts.

    Attributes:
        weights: attention weights, [batch, heads, rows, keys]. Rows of padding may hold anything.
        positions: index of each row in its sequence, [rows].
        query_valid: False for padding, [batch, rows].
        key_valid: False for padding, [batch, keys].
        visible: True where the row may see the key, broadcasts to the shape of `weights`.
        self_attention: whether queries and keys are positions of the same sequence, so that
            there is a distance between them.
        has_distance: whether it is known how far apart these positions are.
        coordinates: where the positions lie, [1 or batch, keys, axes], NaN for those that lie
            nowhere ([CLS]); None: position i lies at i.
        sink: whether part of a row's attention may go to no key, its weights then summing to less
            than 1.
        classes: token class -> True for the keys in it, [batch, keys].
        z: the heads' outputs before W_O, [batch, heads, rows, dim_v], or None.
        projection_gram: W_O^h W_O^h^T of each head, [heads, dim_v, dim_v], or None.
        scores: what the weights are the softmax of, shaped like them, or None.
    """

    weights: Tensor
    positions: Tensor
    query_valid: Tensor
    key_valid: Tensor
    visible: Tensor
    self_attention: bool = True
    has_distance: bool = True
    coordinates: Tensor | None = None
    sink: bool = False
    classes: Mapping[str, Tensor] = field(default_factory=dict)
    z: Tensor | None = None
    projection_gram: Tensor | None = None
    scores: Tensor | None = None

    @cached_property
    def valid(self) -> Tensor:
        """True for rows that are no padding, [batch, 1, rows]."""
        return self.query_valid[:, None]

    @cached_property
    def seen(self) -> Tensor:
        """True where a row may see a key that is no padding, [batch, heads or 1, rows, keys]."""
        return self.visible & self.key_valid[:, None, None]

    @cached_property
    def seen_count(self) -> Tensor:
        """n_i, the number of keys that a row may see, [batch, heads or 1, rows]."""
        return self.seen.sum(dim=-1)

    @cached_property
    def has_choice(self) -> Tensor:
        """True for valid rows that see two keys or more, [batch, heads or 1, rows]."""
        return self.valid & (self.seen_count >= 2)

    @cached_property
    def missing(self) -> Tensor:
        """Mass that goes to no key, [batch, heads, rows]."""
        return missing_mass(self.weights)

    @cached_property
    def distributions(self) -> Tensor:
        """The weights, and beside them the mass that goes to no key: rows that sum to 1."""
        return with_missing_mass(self.weights) if self.sink else self.weights

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of each row in nats, [batch, heads, rows]; mass on no key is an outcome too."""
        if self.scores is None or self.sink:
            return entropy(self.distributions)
        return _entropy_of_softmax(self.weights, self.scores, self.largest)

    @cached_property
    def largest(self) -> Tensor:
        """The largest weight of each row, [batch, heads, rows]."""
        return self.weights.amax(dim=-1)

    @cached_property
    def largest_entropy(self) -> Tensor:
        """Ln n_i, [batch, heads or 1, rows]; with a sink ln(n_i + 1)."""
        return (self.seen_count.clamp_min(2) + self.sink).log()

    @cached_property
    def is_place(self) -> Tensor:
        """True for keys that lie somewhere, [1 or batch, keys]."""
        if self.coordinates is None:
            return torch.ones_like(self.key_valid[:1])
        return self.coordinates.isfinite().all(dim=-1)

    @cached_property
    def is_line(self) -> bool:
        """Whether the positions follow one another along a line, so that each has neighbours."""
        if self.coordinates is None or not self.has_distance:
            return self.has_distance
        return self.coordinates.shape[-1] == 1 and bool((self.coordinates.diff(dim=1) > 0).all())

    @cached_property
    def distances(self) -> Tensor:
        """From row to key, [rows, keys] or [1 or batch, 1, rows, keys]; 0 where one lies nowhere.

        |i - j| in positions, or the Euclidean distance of their coordinates.
        """
        if self.coordinates is None:
            keys = torch.arange(self.weights.shape[-1], device=self.weights.device)
            return (self.positions[:, None] - keys).abs().to(self.weights.dtype)
        rows = self.coordinates[:, self.positions]
        apart = (rows[:, :, None] - self.coordinates[:, None]).square().sum(dim=-1).sqrt()
        return apart.nan_to_num(nan=0.0).to(self.weights.dtype)[:, None]

    @cached_property
    def distance_total(self) -> Tensor:
        """Sum of weight times distance over the keys, [batch, heads, rows]."""
        return (self.weights * self.distances).sum(dim=-1)

    @cached_property
    def place_mass(self) -> Tensor:
        """Mass on keys that lie somewhere, [batch, heads, rows]."""
        return self.mass_on(self.is_place[:, None, None])

    @cached_property
    def distance(self) -> Tensor:
        """Mean distance under the weights on places, [batch, heads, rows]."""
        if self.coordinates is None:
            return self.distance_total
        return self.distance_total / self.place_mass.clamp_min(_LEAST_PLACE_MASS)

    @cached_property
    def from_place(self) -> Tensor:
        """True for valid rows that lie somewhere, [batch, 1, rows]."""
        return self.valid & self.is_place[:, None, self.positions]

    @cached_property
    def has_distances(self) -> Tensor:
        """True for valid rows with a distance, [batch, 1 or heads, rows]."""
        if self.coordinates is None:
            return self.valid
        return self.from_place & (self.place_mass >= _LEAST_PLACE_MASS)

    @cached_property
    def uniform_distance(self) -> Tensor:
        """Mean distance of the places that a row may see; 0 if fewer than 2, [batch, .., rows]."""
        seen = self.seen & self.is_place[:, None, None]
        count = seen.sum(dim=-1)
        return (seen * self.distances).sum(dim=-1) / count.clamp_min(1) * (count >= 2)

    @cached_property
    def masses(self) -> Mapping[str, Tensor]:
        """Mass on the first key and on each token class, each [batch, heads, rows]."""
        first = torch.zeros_like(self.key_valid)
        first.scatter_(1, self.key_valid.int().argmax(dim=1, keepdim=True), value=True)
        features = {"first": first, **self.classes}
        return {
            name: self.mass_on((feature & self.key_valid)[:, None, None])
            for name, feature in features.items()
        }

    def mass_on(self, keys: Tensor) -> Tensor:
        """Sum of the weights on some keys, [batch, heads, rows].

        Args:
            keys: True for these, broadcasts to the shape of the weights.
        """
        # Multiplied and summed: a matrix product with so few columns takes several times as long.
        return (self.weights * keys.to(self.weights.dtype)).sum(dim=-1)

    def offset(self, step: int) -> tuple[Tensor, Tensor]:
        """Mass on key i + step, [batch, heads, rows]; whether there is one, [batch, 1, rows]."""
        keys = self.weights.shape[-1]
        target = self.positions + step
        inside = (target >= 0) & (target < keys)
        target = target.clamp(0, keys - 1)
        mass = self.weights.gather(-1, target[:, None].expand(*self.weights.shape[:-1], 1))[..., 0]
        return mass, self.valid & (inside & self.key_valid[:, target])[:, None]


@dataclass(frozen=True)
class Statistic(ABC):
    """A figure per head: a mean over query rows, kept as two sums.

    A new statistic is a subclass with the texts below and `rows`, and its place in STATISTICS.

    Attributes:
        total: sum of the rows' values, [groups, heads], float64 on the CPU. A group is a text, and
            after `in_blocks` a resampling block.
        count: sum of the rows' weights, [groups, heads]; mostly the number of rows.
    """

    total: Tensor
    count: Tensor

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]
    low: ClassVar[float | None]
    high: ClassVar[float | None]
    definition: ClassVar[str]
    source: ClassVar[str]

    @staticmethod
    @abstractmethod
    def rows(rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Value and weight of each row.

        Returns:
            Values, [batch, heads, rows], and weights that broadcast to them (0 or False: the row
            doesn't count); or None where the statistic does not exist for this kind of attention.
        """

    @classmethod
    def of(cls, rows: Rows) -> Self | None:
        """The sums over some rows, one group per text of the batch."""
        measured = cls.rows(rows)
        return None if measured is None else cls.summed([measured])

    @classmethod
    def summed(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Self:
        """The sums over what `rows` gave for several lots of rows of the same texts."""
        values, weights = (torch.cat(side, dim=-1) for side in zip(*parts, strict=True))
        values, weights = torch.broadcast_tensors(values, weights)
        # Rows of padding may be NaN: they are dropped, not multiplied by 0.
        total = values.masked_fill(weights == 0, 0.0).double().sum(dim=-1)
        return cls(total.cpu(), weights.double().sum(dim=-1).cpu())

    def __add__(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)

    def in_blocks(self, block: Tensor, tokens: Tensor) -> Self:
        """The same sums with the texts of a block added up.

        Args:
            block: the resampling block of each text, 0 to BLOCKS - 1, [texts].
            tokens: number of keys of each text, [texts].

        Returns:
            Sums of shape [BLOCKS, heads].
        """
        del tokens
        empty = self.total.new_zeros(BLOCKS, self.total.shape[1])
        return type(self)(
            empty.index_add(0, block, self.total), empty.index_add(0, block, self.count)
        )

    def value(self) -> Tensor:
        """The figure of each head, [heads]; NaN where no row counted."""
        return self.total.sum(dim=0) / self.count.sum(dim=0)


def missing_mass(weights: Tensor) -> Tensor:
    """What the last axis lacks to a sum of 1, [...]."""
    return (1 - weights.sum(dim=-1)).clamp_min(0.0)


def with_missing_mass(weights: Tensor) -> Tensor:
    """The weights and, as one more entry of the last axis, what they lack to a sum of 1."""
    return torch.cat([weights, missing_mass(weights)[..., None]], dim=-1)


def entropy(weights: Tensor) -> Tensor:
    """Shannon entropy of the last axis, -sum p ln p, with 0 ln 0 = 0.

    Args:
        weights: distributions, [..., keys].

    Returns:
        Entropy in nats, between 0 and ln(keys), [...].

    Example:
        >>> entropy(torch.tensor([0.5, 0.25, 0.25]))
        tensor(1.0397)

    Reference:
        Shannon (1948); natural logarithm as in Clark et al. (2019).
    """
    # Multiplied and summed, not a matrix product: that one adds up term by term, which for long
    # rows is a hundred times less exact and depends on where the memory lies.
    tiny = torch.finfo(weights.dtype).tiny
    negative = weights.clamp_min(tiny).log_().mul_(weights).sum(dim=-1)
    return negative.clamp_max_(0.0).neg_() + 0.0  # no -0


_FAR = -1e4
"""A score this much below the best of its row has a weight of exactly 0."""


def _entropy_of_softmax(weights: Tensor, scores: Tensor, largest: Tensor) -> Tensor:
    """Entropy of softmax rows without a logarithm per weight, in nats, [...].

    With d the scores less the row's best, ln Z = -ln max p, and H = ln Z - sum p d.

    Args:
        weights: softmax of the scores, or all zeros in rows that see no key, [..., keys].
        scores: [..., keys], -inf where a key is masked.
        largest: of each row's weights, [...].
    """
    below = (scores - scores.amax(dim=-1, keepdim=True)).clamp_min_(_FAR)
    total = below.mul_(weights).sum(dim=-1).add_(largest.log()).neg_()
    return total.clamp_min_(0.0).masked_fill(largest == 0, 0.0) + 0.0  # no -0
