"""One attention call of a running model, and its weights, a block of query rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headprobe.attention import attention_scores, masked_scores, weighted_values
from headprobe.capture.places import TOKENS, Places

# A key that a mask pushes this far below the row's best score is masked, not just unloved: masks
# add -1e4 or less, scores of trained models differ by some hundreds.
_MASKED_BELOW = -5000.0


class Block(NamedTuple):
    """Some query rows of one attention call.

    Attributes:
        positions: index of each row in its sequence, [rows] or [batch, rows].
        weights: attention weights, float32 (float64 for a float64 model),
            [batch, heads, rows, keys].
        visible: True where the row may see the key; broadcasts to the shape of `weights`.
        extra: weights on keys that are no position, [batch, heads, rows, extra_keys], or None.
        scores: what the weights are the softmax of, -inf where a key is masked, shaped like them;
            None where they were not computed: the model made the weights, or there are extra keys.
    """

    positions: Tensor
    weights: Tensor
    visible: Tensor
    extra: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """W_O, the linear map that mixes the heads' outputs: z @ weight + bias.

    Attributes:
        site: name of the module that owns it, as in `model.named_modules()`.
        weight: [heads * dim_v, d_model].
        bias: [d_model], or None.
    """

    site: str
    weight: Tensor
    bias: Tensor | None

    def per_head(self, heads: int) -> Tensor:
        """W_O of each head, [heads, dim_v, d_model]."""
        per_head: Tensor = self.weight.unflatten(0, (heads, -1))
        return per_head


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call, as the model made it.

    Either `query` and `key` are there (a fused kernel was called, so the weights are rebuilt from
    what it was given), or `weights` (the model made them itself).

    Attributes:
        site: the module's name, as in `model.named_modules()`.
        call: how many calls the same module made before in this forward pass.
        repeats: the earlier call of the same module that used the same map, if one did.
        seam: the function it was seen at: `sdpa`, `softmax` or `multi_head_attention_forward`.
        streams: names of the model inputs that the positions of queries and keys come from.
        query: [batch, heads, queries, dim], after rotary embedding, or None.
        key: [batch, kv_heads, keys + extra_keys, dim], or None.
        value: [batch, kv_heads, keys + extra_keys, dim_v], or None of a map that somebody kept.
        mask: broadcasts to [batch, heads, queries, keys + extra_keys]; True attends, or a float
            that is added to the scores.
        is_causal: key j is visible to query i if j <= i, on top of the mask.
        scale: factor on the scores; None is 1/sqrt(dim).
        weights: [batch, heads, queries, keys] before dropout, or None.
        output: what the model computed from them: z, [batch, heads, queries, dim_v], or, if
            `output_is_projected`, z after W_O, [batch, queries, d_model]; None if dropout acted.
        extra_keys: how many keys at the end are no position of a sequence (learned ones, zeros).
        sink: whether rows may sum to less than 1, part of the attention going to no position:
            there are extra keys, or a learned score without a key (a sink's column).
        moved: the function that may have put queries or keys into another order than that of the
            input's positions; empty if none did.
        output_is_projected: whether `output` is after W_O.
        output_projection: W_O, or None.
        no_projection: why there is no `output_projection`.
        places: where its positions lie in the model's input.
    """

    site: str
    call: int
    seam: str
    streams: tuple[str | None, str | None]
    value: Tensor | None
    query: Tensor | None = None
    key: Tensor | None = None
    repeats: int | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    weights: Tensor | None = None
    output: Tensor | None = None
    extra_keys: int = 0
    sink: bool = False
    moved: str = ""
    output_is_projected: bool = False
    output_projection: OutputProjection | None = None
    no_projection: str = ""
    places: Places = TOKENS

    @property
    def _map(self) -> Tensor:
        shown = self.weights if self.weights is not None else self.query
        assert shown is not None  # one of the two is always given
        return shown

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self._map.shape[0]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self._map.shape[1]

    @property
    def queries(self) -> int:
        """Number of query positions."""
        return self._map.shape[2]

    @property
    def keys(self) -> int:
        """Number of key positions, extra keys left out."""
        keys = self._map.shape[3] if self.value is None else self.value.shape[2]
        return keys - self.extra_keys

    @property
    def device(self) -> torch.device:
        """Where the attention was computed."""
        return self._map.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's precision: of its values, or of a map without them."""
        return self._map.dtype if self.value is None else self.value.dtype

    @property
    def width(self) -> int:
        """Entries of the heads' outputs side by side, heads * dim_v."""
        assert self.value is not None  # nothing is computed from a map alone
        return self.heads * self.value.shape[-1]

    @property
    def kv_heads(self) -> int | None:
        """Number of distinct key and value heads: less than `heads` in grouped-query attention.

        None without values, since a map doesn't show which heads share their keys.
        Models often repeat the key heads before they call the kernel, so equal neighbours count
        as one (looked at in three positions of the first sequence: some models set padding to 0,
        where all heads are equal).
        """
        if self.value is None:
            return None
        looked_at = [0, self.keys // 2, -1]
        sides = [side[0][:, looked_at] for side in (self.key, self.value) if side is not None]
        # Keys and values may be shared by groups of other sizes: heads that share both share one.
        return max(_distinct_heads(side) for side in sides)

    def contiguous(self) -> AttentionCall:
        """The same call, its keys and values laid out so that a product doesn't copy them first."""
        key, value = (
            None if side is None else side.contiguous() for side in (self.key, self.value)
        )
        return replace(self, key=key, value=value)

    def blocks(self, size: int) -> Iterator[Block]:
        """All query rows in order, `size` at a time; the whole map is never rebuilt at once."""
        for start in range(0, self.queries, size):
            stop = min(start + size, self.queries)
            rows = torch.arange(start, stop, device=self.device)
            yield self._block(partial(_rows, start=start, stop=stop), rows)

    def at(self, index: Tensor) -> Block:
        """Chosen query rows of each sequence.

        Args:
            index: which rows, [batch, rows].
        """

        def pick(tensor: Tensor) -> Tensor:
            chosen = index[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
            return tensor.expand(self.batch, -1, -1, -1).gather(2, chosen)

        return self._block(pick, index)

    def head_outputs(self, block: Block) -> Tensor:
        """Weights · V, the heads' outputs before W_O, [batch, heads, rows, dim_v].

        Args:
            block: rows from `at()` or `blocks()`.
        """
        assert self.value is not None  # nothing is computed from a map alone
        z = weighted_values(block.weights, self.value[:, :, : self.keys])
        if block.extra is not None:
            z = z + weighted_values(block.extra, self.value[:, :, self.keys :])
        return z

    def own_outputs(self, block: Block) -> Tensor:
        """The same, taken from what the model computed where that is at hand.

        Args:
            block: rows from `blocks()`.
        """
        if self.output is None or self.output_is_projected:
            return self.head_outputs(block)
        z = self.output[:, :, block.positions[0] : block.positions[-1] + 1]
        return z if z.dtype == torch.float64 else z.float()

    @torch.no_grad()
    def reconstruction_error(self, block: Block) -> float | None:
        """How far weights · V is from what the model computed, relative to its largest entry.

        Args:
            block: rows from `at()`.

        Returns:
            The largest absolute difference over the largest absolute value, or None where the
            model's own output is not comparable (dropout acted).
        """
        if self.output is None:
            return None
        rebuilt = self.head_outputs(block)
        index = block.positions
        if self.output_is_projected:
            assert self.output_projection is not None
            rebuilt = rebuilt.transpose(1, 2).flatten(2) @ self.output_projection.weight.to(
                rebuilt.dtype
            )
            if self.output_projection.bias is not None:
                rebuilt = rebuilt + self.output_projection.bias
            seen = self.output.gather(1, index[..., None].expand(-1, -1, self.output.shape[-1]))
        else:
            chosen = index[:, None, :, None].expand(-1, self.heads, -1, self.output.shape[-1])
            seen = self.output.gather(2, chosen)
        seen = seen.to(rebuilt.dtype)
        return float((rebuilt - seen).abs().max() / seen.abs().max().clamp_min(1e-30))

    def _block(self, pick: Callable[[Tensor], Tensor], positions: Tensor) -> Block:
        mask = None if self.mask is None else _four_axes(self.mask)
        if mask is not None and mask.shape[2] != 1:
            mask = pick(mask)
        allowed = None
        if self.is_causal:
            keys = torch.arange(self.keys + self.extra_keys, device=positions.device)
            allowed = _four_axes(keys <= positions[..., None], batched=positions.dim() == 2)
        scores = None
        if self.weights is not None:
            weights = pick(self.weights)
            weights = weights if weights.dtype == torch.float64 else weights.float()
        else:
            assert self.query is not None
            assert self.key is not None
            scores = attention_scores(pick(self.query), self.key, scale=self.scale)
            scores, empty = masked_scores(scores, _combine(mask, allowed))
            weights = scores.softmax(dim=-1)
            weights = weights if empty is None else weights.masked_fill(empty, 0.0)
        visible = _combine(None if mask is None else visible_keys(mask), allowed)
        if visible is None:
            visible = torch.ones(1, 1, 1, self.keys, dtype=torch.bool, device=positions.device)
        if not self.extra_keys:
            return Block(positions, weights, visible, scores=scores)
        weights, extra = weights.split([self.keys, self.extra_keys], dim=-1)
        return Block(positions, weights, visible[..., : self.keys], extra)


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[:, :, start:stop]


def visible_keys(mask: Tensor) -> Tensor:
    """Which keys a mask (True attends, or a float to be added), or the scores, leave visible."""
    if not mask.is_floating_point():
        return mask.bool()
    best = mask.amax(dim=-1, keepdim=True)
    return (mask > best + _MASKED_BELOW) | ((mask == best) & mask.isfinite())


def _combine(mask: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    if mask is None or allowed is None:
        return mask if allowed is None else allowed
    if mask.is_floating_point():
        return mask.masked_fill(~allowed, -torch.inf)
    return mask.bool() & allowed


def _four_axes(mask: Tensor, *, batched: bool = False) -> Tensor:
    if batched:
        return mask[:, None]
    return mask[(None,) * (4 - mask.dim())]


def _distinct_heads(side: Tensor) -> int:
    """How many heads there are, equal neighbours counted as one, all groups of one size."""
    given = len(side)
    for group in range(given, 1, -1):
        if given % group == 0:
            grouped = side.unflatten(0, (-1, group))
            if torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
                return given // group
    return given
