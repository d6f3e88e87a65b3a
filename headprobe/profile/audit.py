"""Is this map the model's own? Checked at run time, before anything of it is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headprobe.capture import AttentionCall, Block
from headprobe.profile.texts import Texts

NOT_FINITE = (
    "its weights are not finite: a row whose keys are all masked, an overflow (of float16: use "
    "bfloat16 or float32), or broken parameters"
)

PADDING_MASS = 1e-6
"""Attention to padding that rounding may leave."""


class _Tolerances(NamedTuple):
    """How far a map may be from what the model computed, and its rows from a sum of 1."""

    reconstruction: float
    row_sum: float


_FULL_PRECISION = _Tolerances(reconstruction=1e-4, row_sum=1e-3)
_LOW_PRECISION = _Tolerances(reconstruction=5e-2, row_sum=1e-2)


@dataclass(frozen=True, eq=False)
class Audit:
    """What was found out about one attention call.

    Attributes:
        query_valid: False for padding, [batch, queries].
        key_valid: False for padding, [batch, keys].
        index: the sampled rows, [batch, rows].
        real: False for repetitions that fill up the array, [batch, rows].
        sample: these rows.
        reconstruction_error: see `AttentionCall.reconstruction_error`.
        row_sums: least and largest sum of a row's weights.
        padding_mass: the largest weight on a key that is padding.
        reason: why the map can't be shown; empty if it is the model's own.
    """

    query_valid: Tensor
    key_valid: Tensor
    index: Tensor
    real: Tensor
    sample: Block
    reconstruction_error: float | None
    row_sums: tuple[float, float]
    padding_mass: float
    reason: str


def audit(call: AttentionCall, texts: Texts, rows: int | None, at_once: int) -> Audit | str:
    """Compare weights times values with what the model computed, on a sample of rows.

    Args:
        call: the attention call.
        texts: the batch that the model runs on.
        rows: how many rows of a text are sampled; None for all.
        at_once: how many of these are looked at where all are sampled.

    Returns:
        What was found out, or why the call can't be laid over the texts at all.
    """
    sides = _sides(call, texts)
    if isinstance(sides, str):
        return sides
    query_valid, key_valid = sides
    index, real = texts.sample(query_valid, rows)
    sample = call.at(index[:, :at_once] if rows is None else index)
    sums = sample.weights.sum(dim=-1)
    found = Audit(
        query_valid=query_valid,
        key_valid=key_valid,
        index=index,
        real=real,
        sample=sample,
        reconstruction_error=call.reconstruction_error(sample),
        row_sums=(float(sums.min()), float(sums.max())),
        padding_mass=float(sample.weights.masked_fill(key_valid[:, None, None], 0.0).amax()),
        reason="",
    )
    return replace(found, reason=_reason(call, found))


def row_sum_tolerance(dtype: torch.dtype) -> float:
    """How far rows of weights may be from a sum of 1 in a precision."""
    return _tolerances(dtype).row_sum


def _tolerances(dtype: torch.dtype) -> _Tolerances:
    return _FULL_PRECISION if dtype in (torch.float32, torch.float64) else _LOW_PRECISION


def _sides(call: AttentionCall, texts: Texts) -> tuple[Tensor, Tensor] | str:
    """Which queries and keys are no padding, or why that can't be told."""
    if call.places.padded:
        return "some of its positions are nothing but padding that the model added"
    if call.batch != len(texts):
        return (
            f"its map has {call.batch} sequences, the batch has {len(texts)} texts (of "
            "[positions, batch, ...] tensors? then profile(..., batch_first=False))"
        )
    if call.moved and call.places.coordinates is None:  # else they were followed there
        return f"its positions may be in another order than the input's, after {call.moved!r}"
    same = call.streams[0] is not None and call.streams[0] == call.streams[1]
    if same and call.queries < call.keys:
        # Rows of a block, or after a cache: which tokens they are is not known.
        return (
            f"its map has {call.queries} of the {call.keys} query rows (blocks, a cache, "
            "or keys that are no position)"
        )
    masks = [
        texts.mask(stream, length, call.device)
        for stream, length in zip(call.streams, (call.queries, call.keys), strict=True)
    ]
    for mask in masks:
        if isinstance(mask, str):
            return mask
    query_valid, key_valid = (mask for mask in masks if not isinstance(mask, str))
    return query_valid, key_valid


def _reason(call: AttentionCall, found: Audit) -> str:
    """Why a call's map can't be shown; empty if it is the model's own."""
    tolerance = _tolerances(call.dtype)
    if not bool(found.sample.weights.isfinite().all()):
        return NOT_FINITE
    error = found.reconstruction_error
    if error is not None and not math.isfinite(error):
        return "its values or its output are not finite: broken parameters, or an overflow"
    if error is not None and not error <= tolerance.reconstruction:
        return (
            f"weights times values differ from what the model computed by {error:.2g} of its "
            f"largest entry (at most {tolerance.reconstruction:g} was expected)"
        )
    least = float(found.sample.weights.min())
    if least < -tolerance.row_sum:
        return f"it has negative entries ({least:.2g}): scores, not weights"
    low, high = found.row_sums
    if low == 0 and not call.sink:
        return "some of its rows are zeros: all of their keys are masked"
    if high > 1 + tolerance.row_sum or (low < 1 - tolerance.row_sum and not call.sink):
        return f"its rows don't sum to 1 (but to {low:.2g} .. {high:.2g}): no plain softmax"
    return ""
