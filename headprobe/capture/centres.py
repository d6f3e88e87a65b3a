"""Where the results of a function lie along one axis of the model's input, given its argument's.

Coordinates are numbers for each entry of a tensor; NaN for what comes from no place of the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation")
_POOLS = {
    "avg_pool": ("input", "kernel_size", "stride", "padding"),
    "max_pool": ("input", "kernel_size", "stride", "padding", "dilation"),
}


class Kernel(NamedTuple):
    """A sliding window along one axis."""

    size: int
    stride: int
    padding: int
    dilation: int


def nowhere(tensor: Tensor) -> Tensor:
    """Coordinates of a tensor that comes from no place."""
    return torch.full((1,) * tensor.dim(), torch.nan, device=tensor.device).expand(tensor.shape)


def is_constant(coordinates: Tensor, axis: int) -> bool:
    """Whether nothing varies along an axis."""
    if coordinates.shape[axis] == 1 or coordinates.stride(axis) == 0:
        return True
    first = coordinates.narrow(axis, 0, 1)
    return bool(((coordinates == first) | (coordinates.isnan() & first.isnan())).all())


def is_one_number(coordinates: Tensor, axes: Iterable[int] | None = None) -> bool:
    """Whether one number in memory stands for all entries along some axes, or along all."""
    chosen = range(coordinates.dim()) if axes is None else axes
    return all(coordinates.shape[axis] == 1 or coordinates.stride(axis) == 0 for axis in chosen)


def one_of_each(coordinates: Tensor) -> Tensor:
    """The same, with an axis of size 1 wherever memory holds one number for all of it."""
    steps = coordinates.stride()
    return coordinates[tuple(slice(1) if step == 0 else slice(None) for step in steps)]


def of_features(coordinates: Tensor) -> Tensor:
    """Centre of the last axis, [..., 1]: the mean of what is a place, NaN if nothing is."""
    if coordinates.shape[-1] == 1 or coordinates.stride(-1) == 0:
        return coordinates[..., :1]
    some = one_of_each(coordinates)
    mean = some.mean(dim=-1, keepdim=True, dtype=torch.float64)
    if bool(mean.isnan().any()):
        mean = some.double().nanmean(dim=-1, keepdim=True)
    return mean.float().expand(*coordinates.shape[:-1], 1)


def of_rows(coordinates: Tensor, result: Tensor) -> Tensor | None:
    """Coordinates of a product whose rows come from a tensor's, or None if the axes don't fit."""
    return widened(of_features(coordinates), result.shape)


def widened(coordinates: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Coordinates for another shape; None if something varies along an axis that differs."""
    if coordinates.shape == torch.Size(shape):
        return coordinates
    missing = len(shape) - coordinates.dim()
    if missing < 0:
        return None
    narrow = coordinates[(None,) * missing]
    for axis, size in enumerate(shape):
        if narrow.shape[axis] != size:
            if not is_constant(narrow, axis):
                return None
            narrow = narrow.narrow(axis, 0, 1)
    return narrow.expand(*shape)


def reshaped(coordinates: Tensor, shape: Sequence[int]) -> Tensor:
    """Coordinates in another shape; axes along which memory holds one number are not filled up."""
    if not coordinates.numel():
        return coordinates.reshape(shape)
    before, after = list(coordinates.shape), list(shape)
    i = j = 0
    while i < len(before) and j < len(after):  # axes that are reshaped among themselves
        start, to = (i, j), (coordinates.shape[i], shape[j])
        i, j = i + 1, j + 1
        while to[0] != to[1]:
            if to[0] < to[1]:
                to, i = (to[0] * coordinates.shape[i], to[1]), i + 1
            else:
                to, j = (to[0], to[1] * shape[j]), j + 1
        if is_one_number(coordinates, range(start[0], i)):
            before[start[0] : i] = [1] * (i - start[0])
            after[start[1] : j] = [1] * (j - start[1])
    some = coordinates[tuple(slice(size) for size in before)]
    return some.reshape(after).expand(*shape)


def padded(coordinates: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Coordinates continued on a straight line at both ends of an axis; negative cuts."""
    index = torch.arange(-before, coordinates.shape[axis] + after, device=coordinates.device)
    return at(coordinates, axis, index.double())


def flagged(flags: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Flags with those set that were added at both ends of an axis."""
    index = torch.arange(flags.shape[axis], device=flags.device)
    added = (index < before) | (index >= len(index) - after)
    added = added.reshape(-1, *(1,) * (-axis - 1))
    return torch.where(added, 1.0, one_of_each(flags)).expand(flags.shape)


def at(coordinates: Tensor, axis: int, index: Tensor) -> Tensor:
    """Coordinates at places along an axis: between entries, and beyond the ends, on a line.

    Args:
        coordinates: of any shape.
        axis: negative: which axis, from the end.
        index: where, in entries of that axis, [places].
    """
    shape = list(coordinates.shape)
    size, shape[axis] = shape[axis], len(index)
    some = one_of_each(coordinates)
    if some.shape[axis] == 1:
        return some.expand(shape)
    below = index.floor().clamp(0, size - 2).long()
    share = (index - below).reshape(-1, *(1,) * (-axis - 1))
    low = some.index_select(axis, below).double()
    high = some.index_select(axis, below + 1).double()
    # Right on an entry the other one doesn't count: it may come from no place.
    between = torch.where(share == 1, high, low + (high - low) * share)
    return torch.where(share == 0, low, between).float().expand(shape)


def kernel(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Kernel] | None:
    """The sliding window of a convolution or pooling, an entry per axis; None for other calls."""
    kind, axes = name[:-2], name[-2:]
    names = _CONVOLUTION if kind == "conv" else _POOLS.get(kind)
    if names is None or axes not in ("1d", "2d"):
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    dim = int(axes[0])
    sizes = _each(given["weight"].shape[2:] if kind == "conv" else given["kernel_size"], dim)
    strides = _each(given.get("stride") or (1 if kind == "conv" else sizes), dim)
    dilations = _each(given.get("dilation", 1), dim)
    paddings = given.get("padding", 0)
    if isinstance(paddings, str):
        spans = [(size - 1) * step for size, step in zip(sizes, dilations, strict=True)]
        paddings = [span // 2 if paddings == "same" else 0 for span in spans]
    rows = zip(sizes, strides, _each(paddings, dim), dilations, strict=True)
    return [Kernel(*row) for row in rows]


def of_windows(coordinates: Tensor, result: Tensor, kernels: Sequence[Kernel]) -> Tensor | None:
    """Coordinates of a convolution's result: those at the middle of each window."""
    dim = len(kernels)
    if coordinates.dim() != result.dim() or coordinates.dim() <= dim:
        return None
    centre = of_features(coordinates.movedim(-dim - 1, -1)).movedim(-1, -dim - 1)
    for axis, one in zip(range(-dim, 0), kernels, strict=True):
        starts = torch.arange(result.shape[axis], device=result.device).double() * one.stride
        middles = starts - one.padding + (one.size - 1) * one.dilation / 2
        centre = at(centre, axis, middles)
    return widened(centre, result.shape)


def all_of_windows(flags: Tensor, kernels: Sequence[Kernel]) -> Tensor:
    """Whether all that a convolution's window covers has a flag, the convolution's padding too."""
    dim = len(kernels)
    covered = flags.amin(dim=-dim - 1, keepdim=True)
    for axis, one in zip(range(-dim, 0), kernels, strict=True):
        line = F.pad(covered.movedim(axis, -1), (one.padding, one.padding), value=1.0)
        # A window may go beyond the ends: pooling with `ceil_mode`, or over all there is.
        length = min((one.size - 1) * one.dilation + 1, line.shape[-1])
        windows = line.unfold(-1, length, one.stride)
        covered = windows[..., :: one.dilation].amin(dim=-1).movedim(-1, axis)
    return covered


def of_einsum(letters: str, out: str, result: Tensor, coordinates: Tensor) -> Tensor | None:
    """Coordinates of an einsum's result from one of its factors.

    Args:
        letters: the factor's axes, such as "bhqk".
        out: the result's axes, such as "bqhd".
        result: what einsum gave.
        coordinates: of the factor.

    Returns:
        None where they vary along an axis that is summed over.
    """
    narrow, kept = coordinates, letters
    for letter in letters:
        if letter not in out:
            axis = kept.index(letter)
            if not is_constant(narrow, axis):
                return None
            narrow, kept = narrow.select(axis, 0), kept.replace(letter, "")
    narrow = narrow.permute([kept.index(letter) for letter in out if letter in kept])
    for axis, letter in enumerate(out):
        if letter not in kept:
            narrow = narrow.unsqueeze(axis)
    return widened(narrow, result.shape)


def _each(value: Any, dim: int) -> list[int]:  # noqa: ANN401
    """A number for each axis, where one may stand for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dim if len(values) == 1 else values
