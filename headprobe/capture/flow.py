"""What capture knows about the tensors of a running model, and how it passes from one to the next.

A trace follows a tensor through the functions that the model calls: from the model's input to
queries and keys (is this self- or cross-attention?), from scores through the softmax to the product
with the values (is this softmax attention, and which map did the model use?), from the attention
output to the linear map that consumes it (which one is W_O?).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# Functions that change the order of axes.
_REORDERS = frozenset(
    ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT")
)

# Functions that move numbers about and change none.
RESHAPES = _REORDERS | frozenset(
    (
        *("view", "reshape", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("view_as", "reshape_as", "clone", "detach", "alias", "data", "cpu", "cuda"),
        *("to", "type", "type_as", "float", "half", "bfloat16", "double"),
    )
)

# Functions that may drop the column of a learned sink.
_SLICES = frozenset(("__getitem__", "narrow", "split", "chunk", "tensor_split", "unbind"))

# Functions that may put positions into another order.
_MOVES = frozenset(
    (
        *("flip", "fliplr", "flipud", "roll", "rot90", "sort", "gather", "take_along_dim"),
        *("index_select", "__getitem__"),
    )
)

# Functions that put tensors side by side.
_JOINS = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"))

LEARNED = "(learned)"
"""In place of an input's name: positions that come from parameters alone."""

# Functions after which a product of queries and keys is something else.
_ENDS_PRODUCT = frozenset(
    (
        *("linear", "addmm", "matmul", "bmm", "einsum", "baddbmm", "embedding", "conv1d"),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
    )
)


@dataclass
class Softmaxed:
    """A softmax over scores of queries and keys; attention, once its result meets the values."""

    site: str
    queries: int
    fate: str = "its result was never multiplied with values"
    used: tuple[str, int] | None = None  # the module and its call that multiplied it first


@dataclass
class Consumers:
    """Where an attention output went: the linear maps that took it, and what lay between."""

    maps: list[tuple[str, Tensor, Tensor | None, Tensor]] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        """Nothing counts from now on, and nothing is held: traces would keep it alive."""
        self.maps.clear()
        self.closed = True


@dataclass(frozen=True)
class Trace:
    """What is known about one tensor.

    Attributes:
        stream: the model input that its positions come from, or LEARNED.
        moved: the function that put these positions into another order, if one did.
        product: streams of the queries and keys whose scores it holds.
        softmaxed: the softmax whose weights it holds.
        scores: what went into that softmax, laid out like the weights.
        undropped: the weights before dropout, where dropout has acted on them.
        turned: whether rows and keys of the weights have been swapped.
        sink: whether a column of the weights has been dropped: a learned sink's.
        consumers: for an attention output: where it goes.
        obstacle: what has changed the attention output since, if anything.
    """

    stream: str | None = None
    moved: str | None = None
    product: tuple[str | None, str | None] | None = None
    softmaxed: Softmaxed | None = None
    scores: Tensor | None = None
    undropped: Tensor | None = None
    turned: bool = False
    sink: bool = False
    consumers: Consumers | None = None
    obstacle: str | None = None

    @property
    def is_learned(self) -> bool:
        """Whether nothing is known but that parameters alone decide."""
        return self.stream == LEARNED and not (self.product or self.softmaxed or self.consumers)

    def after(self, name: str, source: Tensor, result: Tensor) -> Trace:
        """The trace of `result`, which the function `name` made from `source`."""
        trace = self
        if trace.product and name in _ENDS_PRODUCT:
            trace = replace(trace, product=None)
        if trace.softmaxed and name in _REORDERS and _is_turned(source, result):
            return replace(trace, turned=not trace.turned)
        kept = _is_still_a_map(source, result)
        kept = kept and (result.shape[-1] == source.shape[-1] or name in _SLICES)
        if name in _REORDERS:
            # A view's strides tell whether its last axes are still the rows and the keys; in
            # which order the others are now is not followed, so that dropped weights are lost.
            kept = kept and source.stride()[-2:] == result.stride()[-2:] and self.undropped is None
        if trace.softmaxed and not kept:
            trace = replace(
                trace, softmaxed=None, scores=None, undropped=None, turned=False, sink=False
            )
        elif trace.softmaxed and result.shape[-1] < source.shape[-1]:
            scores = None if trace.scores is None else _columns(trace.scores, source, result)
            trace = replace(trace, scores=scores, sink=True)
        if trace.undropped is not None:
            trace = replace(trace, undropped=_like(trace.undropped, source, result))
        if trace.consumers and trace.obstacle is None and name not in RESHAPES:
            trace = replace(trace, obstacle=name)
        return trace


class Traces:
    """The traces of all living tensors; a tensor's trace dies with it."""

    def __init__(self) -> None:
        self._traces = WeakTensorKeyDictionary()

    def of(self, tensor: object) -> Trace:
        """What is known of a tensor; an empty trace if nothing is."""
        if not isinstance(tensor, Tensor):
            return _NOTHING
        found: Trace | None = self._traces.get(tensor)
        if found is None:
            return _PARAMETER if isinstance(tensor, nn.Parameter) else _NOTHING
        return found

    def set(self, tensor: Tensor, trace: Trace) -> None:
        """Remember what is known of a tensor."""
        self._traces[tensor] = trace

    def clear(self) -> None:
        """Forget everything."""
        self._traces.clear()

    def pass_on(self, name: str, arguments: Iterable[object], result: object) -> None:
        """Give the results of a function what is known of its arguments.

        Where arguments come from different streams the first decides: in `x + position` and
        `rotate(q) * cos` it is the tensor whose positions the result keeps.
        """
        given = list(tensors_in(arguments))
        traced = [(tensor, self.of(tensor)) for tensor in given]
        traced = [(tensor, trace) for tensor, trace in traced if trace is not _NOTHING]
        # Parameters tell nothing where something else does.
        told = [one for one in traced if not one[1].is_learned] or traced
        if not told or (told[0][1].is_learned and not _all_float(given)):
            return  # an index from somewhere chose among the parameters
        source, merged = told[0]
        for _, trace in told[1:]:
            merged = _merge(merged, trace)
        streams = {trace.stream for _, trace in told} - {None, LEARNED}
        if name in _JOINS and len(streams) > 1:  # positions of several inputs in one sequence
            merged = replace(merged, stream=None)
        if source is given[0] and merged.stream != LEARNED and _moves(name, arguments):
            merged = replace(merged, moved=name)
        for tensor in tensors_in((result,)):  # an in-place function gives its source back
            self.set(tensor, merged.after(name, source, tensor))


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among a function's arguments or results, also in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def name_of(function: Any) -> str:  # noqa: ANN401
    """A torch function's name; for a property like `.mT` the property's."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return str(getattr(function.__self__, "__name__", name))
    return str(name)


_NOTHING = Trace()
_PARAMETER = Trace(stream=LEARNED)


def _merge(first: Trace, second: Trace) -> Trace:
    return Trace(
        stream=first.stream or second.stream,
        # Added to states that were not moved, what was moved must have been moved back.
        moved=first.moved if second.stream is None or second.moved else None,
        product=first.product or second.product,
        softmaxed=first.softmaxed or second.softmaxed,
        scores=second.scores if first.scores is None else first.scores,
        undropped=second.undropped if first.undropped is None else first.undropped,
        turned=first.turned or second.turned,
        sink=first.sink or second.sink,
        consumers=first.consumers or second.consumers,
        obstacle=first.obstacle or second.obstacle,
    )


def _all_float(tensors: Iterable[Tensor]) -> bool:
    return all(tensor.is_floating_point() for tensor in tensors)


def _moves(name: str, arguments: Iterable[object]) -> bool:
    """Whether a function may put positions into another order.

    Slices don't, nor does what moves features, which are on the last axis.
    """
    if name not in _MOVES:
        return False
    first, *others = arguments
    assert isinstance(first, Tensor)
    if name == "__getitem__":
        return any(index.dim() and index.dtype != torch.bool for index in tensors_in(others))
    axes = [axis for axis in others if isinstance(axis, int | tuple | list)]
    axes = [axis for axis in axes if not isinstance(axis, bool)][-1:]
    return not axes or any(axis % first.dim() != first.dim() - 1 for axis in _numbers(axes))


def _numbers(values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple):
            yield from _numbers(value)


def _is_turned(source: Tensor, result: Tensor) -> bool:
    """Whether the last two axes have been swapped and no others."""
    if result.dim() != source.dim() or source.dim() < 2:
        return False
    order = [*range(source.dim() - 2), source.dim() - 1, source.dim() - 2]
    turned = source.permute(order)
    return turned.shape == result.shape and turned.stride() == result.stride()


def _is_still_a_map(source: Tensor, result: Tensor) -> bool:
    """Whether rows stay rows and keys stay keys; a learned sink's column may be dropped."""
    if not source.dim():
        return False
    keys = source.shape[-1]
    if result.dim() < 3 or result.shape[-1] not in (keys, keys - 1) or not result.numel():
        return False
    return source.numel() // keys == result.numel() // result.shape[-1]


def _like(kept: Tensor, source: Tensor, result: Tensor) -> Tensor | None:
    """The weights before dropout in the shape that the dropped ones have now."""
    if result.shape[-1] != source.shape[-1]:
        columns = _columns(kept, source, result)
        if columns is None:
            return None
        kept = columns
    return kept.reshape(result.shape) if kept.numel() == result.numel() else None


def _columns(kept: Tensor, source: Tensor, result: Tensor) -> Tensor | None:
    """All columns but the first or the last, as `result` has them of `source`; None if unknown."""
    if kept.shape[-1] != source.shape[-1]:
        return None
    if source.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
        return None
    start = int(result.storage_offset() != source.storage_offset())
    return kept[..., start : start + result.shape[-1]]
