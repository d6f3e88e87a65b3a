"""Captured maps against those that the model itself gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.sweep.runs import Run, call, with_attention

SAME = 1e-5
"""A captured map equals the model's own if no entry differs by more."""

RECONSTRUCTED = 1e-4
"""Weights times values are what the model computed if they differ by less of its largest entry."""


@dataclass
class Seen:
    """One attention call: its map, and how far weights times values are from the model's own."""

    site: str
    weights: Tensor
    error: float | None
    same: bool = False

    @property
    def true(self) -> bool:
        """Whether the map is shown to be the model's own."""
        return self.same if self.error is None else self.error < RECONSTRUCTED


@torch.no_grad()
def own_maps(run: Run) -> list[Tensor]:
    """The maps that the model itself gives with the eager implementation."""
    try:
        eager = with_attention(run, "eager")
        output = call(eager.model, run.inputs, output_attentions=True)
    except Exception:  # it has none to give
        return []
    found = _attentions(output, named=False)
    return [m.float() for m in {m.data_ptr(): m for m in found}.values()]


def _attentions(output: object, *, named: bool) -> Iterator[Tensor]:
    """The tensors of an output that are called attentions; some are there twice."""
    if isinstance(output, Mapping):
        for name, value in output.items():
            yield from _attentions(value, named=named or "attentions" in str(name))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _attentions(value, named=named)
    elif named and isinstance(output, Tensor) and output.dim() >= 3:
        yield output


@dataclass
class Compared:
    """A map that the model itself gives, and its difference from the captured one nearest to it."""

    shape: list[int]
    difference: float

    @property
    def fits(self) -> bool:
        """Whether there is a captured map of its shape at all."""
        return math.isfinite(self.difference)


def compare(seen: list[Seen], own: list[Tensor]) -> list[Compared]:
    """All maps of the model's own, each with the captured map that is nearest to it."""
    compared = []
    for weights in own:
        found = [(_difference(call.weights, weights), call) for call in seen if not call.same]
        best, call = min(found, key=lambda pair: pair[0], default=(math.inf, None))
        if call is not None and best <= SAME:
            call.same = True
        elif not _is_map(weights) or _is_sampled(weights, seen):
            continue
        compared.append(Compared(list(weights.shape), best))
    return compared


def _difference(weights: Tensor, own: Tensor) -> float:
    """The largest difference over the rows that see a key; infinite if the shapes don't fit.

    Some models give the mean over the heads, once or for every head: it is compared with the mean.
    """
    whole = weights.numel() == own.numel() and weights.shape[-1] == own.shape[-1]
    if whole:
        difference = _of_rows(weights.reshape(own.shape), own)
        if difference <= SAME:
            return difference
    mean = weights.mean(dim=1)
    if own.shape == mean.shape:
        return _of_rows(mean, own)
    if own.shape == weights.shape and bool((own == own[:, :1]).all()):
        return _of_rows(mean, own[:, 0])
    return difference if whole else math.inf


def _of_rows(weights: Tensor, own: Tensor) -> float:
    rows = (weights.sum(dim=-1) > 0) & own.isfinite().all(dim=-1)
    return float((weights - own)[rows].abs().max()) if bool(rows.any()) else math.inf


def _is_sampled(weights: Tensor, seen: list[Seen]) -> bool:
    """Whether these are weights of points sampled for each query, [batch, queries, heads, ..]."""
    heads = {call.weights.shape[1] for call in seen}
    queries = {call.weights.shape[2] for call in seen}
    return weights.dim() > 3 and weights.shape[1] in queries - heads


def _is_map(weights: Tensor) -> bool:
    """Whether rows of more than one key sum to 1: some models call their scores attentions."""
    return weights.shape[-1] > 1 and bool((weights.sum(dim=-1) - 1).abs().max() < 1e-3)
