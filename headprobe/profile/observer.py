"""Measures the attention calls of one forward pass, and compares the layers at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headprobe.attention import weighted_values
from headprobe.capture import AttentionCall, Block
from headprobe.errors import HeadprobeError
from headprobe.profile.sums import Address, Layer, Profile
from headprobe.profile.texts import Texts
from headprobe.statistics import LAYER_STATISTICS, STATISTICS, PairSums, Rows, Statistic

if TYPE_CHECKING:
    from headprobe.profile.run import Sampling

_BLOCK_ENTRIES = 2**20
"""Entries of a block of weights: small enough for the cache, large enough to be worth a call."""

_ROWS_AT_ONCE = 16
"""Rows per text on which heads are compared at a time."""

_PADDING_MASS = 1e-6


class _Tolerances(NamedTuple):
    """How far a map may be from what the model computed, and its rows from a sum of 1."""

    reconstruction: float
    row_sum: float


_FULL_PRECISION = _Tolerances(reconstruction=1e-4, row_sum=1e-3)
_LOW_PRECISION = _Tolerances(reconstruction=5e-2, row_sum=1e-2)


@dataclass(frozen=True, eq=False)
class Compared:
    """The rows of one layer on which its heads are compared with others.

    Attributes:
        address: which call of which module this is.
        heads: number of heads.
        axes: the streams and lengths of queries and keys; heads of unlike ones have no similarity.
        source: the weights of these rows, or the call to rebuild them from when they are needed.
        index: the sampled rows, [batch, rows].
        real: False for repetitions that fill up the array, [batch, rows].
        key_valid: False for padding, [batch, keys].
    """

    address: Address
    heads: int
    axes: tuple[str | None, str | None, int, int]
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


class Observer:
    """Called with each attention call of a forward pass.

    Args:
        texts: the batch that the model runs on.
        sampling: on which rows heads are compared.
    """

    def __init__(self, texts: Texts, sampling: Sampling) -> None:
        self._texts = texts
        self._sampling = sampling
        self._layers: list[Layer] = []
        self._compared: list[Compared] = []
        self._left_out: dict[str, str] = {}

    def __call__(self, call: AttentionCall) -> None:
        """Measure the call, or note why it is left out."""
        sides = self._sides(call)
        if isinstance(sides, str):
            self._left_out.setdefault(call.site, sides)
            return
        query_valid, key_valid = sides
        index, real = self._texts.sample(query_valid, self._sampling.rows)
        sample = call.at(index[:, :_ROWS_AT_ONCE] if self._sampling.rows is None else index)
        error = call.reconstruction_error(sample)
        reason = _audit(call, sample, key_valid, error)
        if reason:
            self._left_out.setdefault(call.site, reason)
            return
        # Keys of another number are another sequence, if only a pooled one: key i isn't query i.
        is_cross = call.streams[0] != call.streams[1] or call.queries != call.keys
        statistics, later = self._statistics(call, query_valid, key_valid, is_cross)
        self._layers.append(
            Layer(
                site=call.site,
                call=call.call,
                seam=call.seam,
                streams=call.streams,
                heads=call.heads,
                kv_heads=call.kv_heads,
                no_projection=call.no_projection,
                is_cross=is_cross,
                later_keys=later,
                reconstruction_error=error,
                statistics=statistics,
            )
        )
        self._compared.append(
            Compared(
                address=(call.site, call.call),
                heads=call.heads,
                axes=(*call.streams, call.queries, call.keys),
                source=sample if self._sampling.rows is not None else replace(call, output=None),
                index=index,
                real=real,
                key_valid=key_valid,
            )
        )

    def finish(self, unread: Mapping[str, str], settings: Mapping[str, Any]) -> Profile:
        """Compare the layers and give everything that was measured.

        Args:
            unread: modules that attended and could not be read, and why.
            settings: what the measurement depends on.
        """
        measured = tuple(layer for layer in self._layers if layer.site not in self._left_out)
        # A second softmax in a module doesn't spoil the attention that was read there.
        sites = {layer.site for layer in measured}
        unread = {site: why for site, why in unread.items() if site not in sites}
        return Profile(
            measured=measured,
            pair_sums=self._pair_sums(),
            left_out=unread | self._left_out,
            texts=len(self._texts),
            tokens=self._texts.tokens,
            class_tokens=self._texts.class_tokens,
            settings=dict(settings),
        )

    def _sides(self, call: AttentionCall) -> tuple[Tensor, Tensor] | str:
        """Which queries and keys are no padding, or why that can't be told."""
        if call.batch != len(self._texts):
            return f"its map has {call.batch} sequences, the batch has {len(self._texts)} texts"
        same = call.streams[0] is not None and call.streams[0] == call.streams[1]
        if same and call.queries < call.keys:
            # Rows of a block, or after a cache: which tokens they are is not known.
            return f"its map has {call.queries} of the {call.keys} query rows (blocks, or a cache)"
        device = call.value.device
        masks = [
            self._texts.mask(stream, length, device)
            for stream, length in zip(call.streams, (call.queries, call.keys), strict=True)
        ]
        for mask in masks:
            if isinstance(mask, str):
                return mask
        query_valid, key_valid = (mask for mask in masks if not isinstance(mask, str))
        return query_valid, key_valid

    def _statistics(
        self, call: AttentionCall, query_valid: Tensor, key_valid: Tensor, is_cross: bool
    ) -> tuple[dict[str, Statistic], int]:
        """Every statistic of a call, and how many later keys its valid rows may see."""
        gram = None
        if call.output_projection is not None:
            per_head = call.output_projection.per_head(call.heads)
            if per_head.dtype != torch.float64:
                per_head = per_head.float()
            gram = per_head @ per_head.transpose(1, 2)
        classes = self._texts.classes_of(call.streams[1], call.keys)
        sums: dict[str, Statistic] = {}
        later = 0
        size = max(1, _BLOCK_ENTRIES // (call.batch * call.heads * call.keys))
        for block in call.blocks(size):
            start = int(block.positions[0])
            rows = Rows(
                weights=block.weights,
                positions=block.positions,
                query_valid=query_valid[:, start : start + len(block.positions)],
                key_valid=key_valid,
                visible=block.visible,
                self_attention=not is_cross,
                classes=classes,
                z=None if gram is None else weighted_values(block.weights, call.value),
                projection_gram=gram,
            )
            later += _later_keys(rows)
            for statistic in (*STATISTICS, *LAYER_STATISTICS):
                measured = statistic.of(rows)
                if measured is not None:
                    old = sums.get(statistic.name)
                    sums[statistic.name] = measured if old is None else old + measured
        tokens = key_valid.sum(dim=1).cpu()
        blocks = self._texts.blocks
        return {name: total.in_blocks(blocks, tokens) for name, total in sums.items()}, later

    def _pair_sums(self) -> dict[tuple[Address, Address], PairSums]:
        panels: dict[Any, list[Compared]] = defaultdict(list)
        for compared in self._compared:
            if compared.address[0] not in self._left_out:
                panels[compared.axes].append(compared)
        chosen = _choose(list(panels.values()), self._sampling)
        sums: dict[tuple[Address, Address], PairSums] = {}
        for panel in panels.values():
            for key, measured in self._compare(panel, chosen):
                sums[key] = sums[key] + measured if key in sums else measured
        return sums

    def _compare(
        self, panel: list[Compared], chosen: set[tuple[Address, Address]]
    ) -> Iterator[tuple[tuple[Address, Address], PairSums]]:
        """The sums of all chosen pairs of layers of a panel, some rows at a time."""
        across = self._sampling.rows_across
        for start in range(0, panel[0].index.shape[1], _ROWS_AT_ONCE):
            rows = {c.address: c.rows(start, start + _ROWS_AT_ONCE) for c in panel}
            for first, second in combinations_with_replacement(panel, 2):
                key = (first.address, second.address)
                if key not in chosen:
                    continue
                (a, real_a), (b, real_b) = rows[first.address], rows[second.address]
                both = real_a & real_b
                if first is not second and across is not None:
                    both = both & (torch.arange(both.shape[1], device=both.device) + start < across)
                yield key, self._compare_layers(a, b, both, first.key_valid)

    def _compare_layers(self, a: Tensor, b: Tensor, rows: Tensor, keys: Tensor) -> PairSums:
        texts = [
            (a[text][:, rows[text]][..., keys[text]], b[text][:, rows[text]][..., keys[text]])
            for text in range(len(self._texts))
        ]
        return PairSums.of(texts, self._texts.blocks.tolist())


def _audit(call: AttentionCall, sample: Block, key_valid: Tensor, error: float | None) -> str:
    """Why a call's map can't be shown; empty if it is the model's own."""
    full = call.value.dtype in (torch.float32, torch.float64)
    tolerance = _FULL_PRECISION if full else _LOW_PRECISION
    if error is not None and not error <= tolerance.reconstruction:
        return (
            f"weights times values differ from what the model computed by {error:.2g} of its "
            f"largest entry (at most {tolerance.reconstruction:g} was expected)"
        )
    sums = sample.weights.sum(dim=-1)
    worst = float((sums - 1).abs().max())
    if not worst <= tolerance.row_sum:
        return f"its rows don't sum to 1 (off by {worst:.2g}): a sink or logits, not plain softmax"
    on_padding = float(sample.weights.masked_fill(key_valid[:, None, None], 0.0).amax())
    if on_padding > _PADDING_MASS:
        raise HeadprobeError(
            f"{call.site!r} attends to padding (weight {on_padding:.2g}): the model doesn't use "
            "the mask; give it texts of one length, or one text at a time"
        )
    return ""


def _later_keys(rows: Rows) -> int:
    if not rows.self_attention:
        return 0
    keys = torch.arange(rows.weights.shape[-1], device=rows.weights.device)
    later = keys > rows.positions[:, None]
    return int((rows.seen & later & rows.valid[..., None]).any(dim=1).sum())


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
