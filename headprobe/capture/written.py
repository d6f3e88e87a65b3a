"""Attention that the model writes out: scores, a softmax, dropout, and the product with the values.

Each seam runs the model's own function with its own arguments and returns its own result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headprobe.capture.call import AttentionCall
from headprobe.capture.flow import LEARNED, Softmaxed, Trace, name_of, tensors_in
from headprobe.capture.layout import (
    Axes,
    einsum_axes,
    four_axes,
    is_weight,
    unstack,
    visible_in_scores,
)
from headprobe.capture.watch import NO_SOFTMAX, Arguments, Keywords, Watch


def softmax(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """A softmax over scores may be attention; its product with the values will tell."""
    result: Tensor = func(*args, **kwargs)
    scores: Tensor = args[0] if args else kwargs["input"]
    trace = watch.traces.of(scores)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if trace.product is None or not isinstance(dim, int):
        watch.traces.pass_on("softmax", (scores,), result)
        return result
    seen = Softmaxed(watch.running.site, scores.shape[-2] if scores.dim() > 1 else 1)
    if dim % scores.dim() != scores.dim() - 1:
        seen.fate = f"the softmax runs over axis {dim}, not over the last"
    else:
        watch.traces.set(
            result,
            Trace(stream=trace.stream, product=trace.product, softmaxed=seen, scores=scores),
        )
    watch.softmaxes.append(seen)
    return result


def exponential(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """A softmax may be written out, as exp and a division: whether rows sum to 1 is seen later."""
    scores: Tensor = args[0] if args else kwargs["input"]
    trace = watch.traces.of(scores)
    result: Tensor = func(*args, **kwargs)
    if trace.product is None or trace.softmaxed or scores.dim() < 2:
        watch.traces.pass_on("exp", (scores,), result)
        return result
    seen = Softmaxed(watch.running.site, scores.shape[-2])
    kept = None if result is scores else scores  # exp_ overwrites them
    watch.traces.set(
        result, Trace(stream=trace.stream, product=trace.product, softmaxed=seen, scores=kept)
    )
    return result


def dropout(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """Dropout on weights: those before it are kept."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    before: Tensor = given["input"]
    trace = watch.traces.of(before)
    training = given.get("training", given.get("train", True))  # F.dropout's word, torch.dropout's
    acts = training and given.get("p", 0.5) > 0
    undropped = before
    if acts and trace.softmaxed and given.get("inplace"):
        undropped = before.clone()
    result: Tensor = func(*args, **kwargs)
    if not acts:
        watch.traces.pass_on("clone", (before,), result)
    elif trace.softmaxed:
        watch.traces.set(
            result,
            replace(trace, undropped=undropped),
        )
    else:
        watch.traces.pass_on("dropout", (before,), result)
    return result


def product(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """A matmul, bmm, baddbmm or einsum: scores, values weighted, or a linear map."""
    result: Tensor = func(*args, **kwargs)
    factors = list(tensors_in((*args, *kwargs.values())))[-2:]  # baddbmm adds the one before
    if len(factors) < 2:
        watch.traces.pass_on(name_of(func), factors, result)
        return result
    first, second = factors
    if name_of(func) == "__rmatmul__":
        first, second = second, first
    left, right = watch.traces.of(first), watch.traces.of(second)
    equation = args[0] if func is torch.einsum and isinstance(args[0], str) else ""
    if left.softmaxed is None and right.softmaxed and equation:
        # The order of factors is free: here the weights come first.
        first, second, left, right = second, first, right, left
        equation = _swapped(equation)
    mixes = is_weight(second) and right.stream in (None, LEARNED)
    if left.softmaxed is None and right.softmaxed and right.turned:
        return _turned_back(watch, first, second, result)
    if left.softmaxed and not mixes and not _misuse(left, right):
        orders = _orders(func, equation, first, second, result)
        return _weighted(watch, first, second, result, orders)
    if mixes:
        watch.linear_map(first, second, None, result)
        is_map = left.product and not left.softmaxed
        if is_map and result.shape == first.shape:  # heads may be mixed before the softmax
            watch.traces.set(result, Trace(stream=left.stream, product=left.product))
        return result
    _scores(watch, (left, right), first, result)
    return result


def _misuse(left: Trace, right: Trace) -> str:
    """Why a product with a map is no mixture of values; empty if it is one."""
    if left.softmaxed and right.softmaxed:
        return "the weights are multiplied with weights"
    if left.softmaxed:
        return "its rows and keys were swapped before the product" if left.turned else ""
    return "the weights are the second factor of the product"


def _scores(watch: Watch, sides: tuple[Trace, Trace], first: Tensor, result: Tensor) -> None:
    """What two factors give that are no weights and values, and no linear map."""
    left, right = sides
    seen = left.softmaxed or right.softmaxed
    if seen is not None:
        seen.fate = _misuse(left, right) or seen.fate
    if left.product and None not in left.product and watch.is_sequence(right.stream, first):
        watch.unreadable(watch.running.site, NO_SOFTMAX)
    streams = (left.stream, right.stream)
    watch.traces.set(result, Trace(stream=left.stream or right.stream, product=streams))


def _turned_back(watch: Watch, values: Tensor, turned: Tensor, result: Tensor) -> Tensor:
    """Values [.., dim, keys] times turned weights: the product of weights and values, turned."""
    weights = turned.mT
    watch.traces.set(weights, replace(watch.traces.of(turned), turned=False))
    axes = tuple(range(values.dim())), tuple(range(result.dim()))
    mixed = _weighted(watch, weights, values.mT, result.mT, axes)
    result = mixed.mT
    watch.traces.set(result, watch.traces.of(mixed))
    return result


def linear(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """`F.linear`, which may be W_O."""
    result: Tensor = func(*args, **kwargs)
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    watch.linear_map(given["input"], given["weight"].t(), given.get("bias"), result)
    return result


def addmm(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """`torch.addmm`, as in Conv1D, which may be W_O."""
    result: Tensor = func(*args, **kwargs)
    given = dict(zip(("input", "mat1", "mat2"), args, strict=False)) | kwargs
    watch.linear_map(given["mat1"], given["mat2"], given["input"], result)
    return result


def _weighted(
    watch: Watch, consumed: Tensor, values: Tensor, result: Tensor, orders: tuple[Axes, Axes] | None
) -> Tensor:
    """The weights meet the values: this is an attention call."""
    trace = watch.traces.of(consumed)
    assert trace.softmaxed is not None
    assert trace.product is not None
    read = _read(watch, consumed, values, result, orders)
    if read is None:
        watch.softmaxes.append(trace.softmaxed)
        trace.softmaxed.fate = (
            f"weights {list(consumed.shape)} and values {list(values.shape)} are not laid out "
            "[batch, heads, queries, keys]"
        )
        return result
    w, v, z = read
    site = watch.running.site
    number = watch.running.count_call(site)
    first = trace.softmaxed.used = trace.softmaxed.used or (site, number)
    gate = watch.gate(site, w.shape[1])
    if gate is not None:
        assert orders is not None
        z = z * gate.to(z)
        order = orders[1]
        inverse = [order.index(axis) for axis in range(len(order))]
        result = z.reshape([result.shape[axis] for axis in order]).permute(inverse)
    call = AttentionCall(
        site=site,
        call=number,
        repeats=first[1] if first[0] == site and first[1] < number else None,
        seam="softmax",
        streams=trace.product,
        weights=w,
        value=v,
        mask=visible_in_scores(trace.scores, w),
        output=z if trace.undropped is None and gate is None else None,
        sink=trace.sink,
        moved=trace.moved or watch.traces.of(values).moved or "",
    )
    watch.await_projection(call, result, folded=consumed.dim() != 4)
    return result


def _read(
    watch: Watch, consumed: Tensor, values: Tensor, result: Tensor, orders: tuple[Axes, Axes] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Weights before dropout, values and output with four axes; None where that fails."""
    trace = watch.traces.of(consumed)
    if orders is None or trace.softmaxed is None:
        return None
    weights = consumed if trace.undropped is None else trace.undropped
    sides = (weights, values.permute(orders[0]), result.permute(orders[1]))
    stream = trace.product[0] if trace.product else None
    batch = watch.sequences(stream, trace.softmaxed.queries)
    w, v, z = (four_axes(side, batch) for side in sides)
    if w is None or v is None or z is None or w.shape[-1] != v.shape[2]:
        return None
    queries = trace.softmaxed.queries
    if w.shape[2] != queries and w.shape[2] % queries == 0:
        w, z = unstack(w, queries), unstack(z, queries)
    return (w, v, z) if w.shape[2] == queries and w.shape[:3] == z.shape[:3] else None


def _swapped(equation: str) -> str:
    """The einsum equation with its factors the other way round."""
    factors, arrow, result = equation.partition("->")
    return ",".join(reversed(factors.split(","))) + arrow + result


def _orders(
    func: Any,  # noqa: ANN401
    equation: str,
    weights: Tensor,
    values: Tensor,
    result: Tensor,
) -> tuple[Axes, Axes] | None:
    """How values and result are permuted: not at all, but for einsum."""
    if func is torch.einsum:
        return einsum_axes(equation, weights.dim()) if equation else None
    return tuple(range(values.dim())), tuple(range(result.dim()))
