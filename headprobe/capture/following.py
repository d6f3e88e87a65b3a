"""Where in the model's input the positions of a tensor lie, followed through the model's functions.

Beside a tensor go coordinates: for each axis of the input, a number for each entry of the tensor
that says where along that axis the entry comes from. What moves entries about (reshape, cat, roll)
moves their coordinates in the same way, what mixes some (linear, conv) gives their centre, and any
other function ends them. Grids, strides, class tokens and windows follow from that, whoever made
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from headprobe.capture import centres
from headprobe.capture.flow import name_of, tensors_in

PADDING = -1
"""In place of an axis: 1 for an entry that the model added to fill up a shape, else 0 or NaN."""

Coordinates = dict[int, Tensor]
"""Axis of the input, or PADDING -> a number for each entry of a tensor, of the tensor's shape."""

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

# Functions that hand on their first tensor.
_SAME = frozenset(
    (
        *("contiguous", "clone", "detach", "alias", "data", "cpu", "cuda", "to", "type", "type_as"),
        *("float", "half", "bfloat16", "double"),
    )
)

_VIEWS = frozenset(("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten"))

# Functions that move entries about: the same function moves their coordinates.
_MOVES = frozenset(
    (
        *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT"),
        *("squeeze", "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "tile"),
        *("roll", "flip", "rot90", "__getitem__", "pixel_unshuffle"),
        *("chunk", "split", "tensor_split", "split_with_sizes", "unbind", "select", "narrow"),
        *("index_select", "gather", "take_along_dim"),
        *("cat", "concat", "concatenate", "stack", "hstack", "vstack"),
    )
)

# Functions after which each entry is still at its place; of several tensors the first decides.
_KEEPS = frozenset(
    (
        *("add", "sub", "mul", "div", "truediv", "true_divide", "neg", "pow", "square", "sqrt"),
        *("rsqrt", "exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "abs", "clamp"),
        *("clip", "clamp_min", "clamp_max", "maximum", "minimum", "masked_fill", "lerp", "addcmul"),
        *("nan_to_num", "softmax", "log_softmax", "normalize", "fill", "zero"),
        *("relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "leaky_relu"),
        *("prelu", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "glu"),
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout"),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
    )
)

# Functions whose rows are those of one tensor -> which one that is.
_PRODUCTS = {
    **dict.fromkeys(("linear", "matmul", "bmm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "__rmatmul__"), 1),
    **dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward"), 0),
}


class Following(TorchFunctionMode):
    """Follows the coordinates of all tensors that come from the inputs given to `start`.

    Attributes:
        inputs: shapes of the inputs that are followed, by name.
        convolved: whether a convolution was seen: what it slides along holds the positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, torch.Size] = {}
        self.convolved = False
        self._coordinates = WeakTensorKeyDictionary()

    def start(self, inputs: Mapping[str, Tensor]) -> None:
        """Follow the inputs that are grids of numbers; token ids have no place but their own.

        Args:
            inputs: name -> tensor.
        """
        self.clear()
        for name, tensor in inputs.items():
            if tensor.is_floating_point() and tensor.dim() >= 2 and not tensor.is_nested:
                self.inputs[name] = tensor.shape
                self._set(tensor, _own(tensor))

    def clear(self) -> None:
        """Forget everything."""
        self._coordinates.clear()
        self.inputs = {}
        self.convolved = False

    def of(self, tensor: object) -> Coordinates:
        """The coordinates of a tensor; empty if they are not known."""
        if not isinstance(tensor, Tensor):
            return {}
        found: Coordinates = self._coordinates.get(tensor, {})
        return found

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.inputs and any(self.of(t) for t in tensors_in((*args, *kwargs.values()))):
            self._follow(func, args, kwargs, result)
        return result

    @torch.no_grad()
    def _follow(self, func: Any, args: Arguments, kwargs: Keywords, result: object) -> None:  # noqa: ANN401
        name = _plain(name_of(func))
        if name == "__setitem__":
            if self.of(args[2]):  # numbers and learned vectors leave the place where it is
                self._set(args[0], {})
            return
        results = [tensor for tensor in tensors_in((result,)) if tensor.is_floating_point()]
        if not results:
            return
        if name in _MOVES:
            in_place = name_of(func) != name
            made = [] if in_place else self._moved(func, args, kwargs, results)
        else:
            made = [self._made(name, args, kwargs, results[0])]
        for index, tensor in enumerate(results):
            self._set(tensor, made[index] if index < len(made) else {})

    def _made(self, name: str, args: Arguments, kwargs: Keywords, one: Tensor) -> Coordinates:
        """The coordinates of a function's first result; empty if the function ends them."""
        tensors = list(tensors_in((*args, *kwargs.values())))
        first = tensors[0]
        if name in _SAME:
            return self._each(first, lambda axis: axis.to(one.device))
        if name in _VIEWS and one.numel() == first.numel():
            return self._each(first, lambda axis: centres.reshaped(axis, one.shape))
        if name in _PRODUCTS:
            rows = tensors[_PRODUCTS[name]]
            return self._each(rows, lambda axis: centres.of_rows(axis, one))
        if name in _KEEPS:
            return self._first(tensors, lambda axis: centres.widened(axis, one.shape))
        if name == "einsum":
            return self._einsum(args[0], tensors, one)
        if name == "pad":
            return self._padded(*args, **kwargs)
        kernels = centres.kernel(name, args, kwargs)
        if kernels is None:
            return {}
        self.convolved = True
        made = self._each(first, lambda axis: centres.of_windows(axis, one, kernels))
        if PADDING in made:
            flags = self.of(first)[PADDING]
            made[PADDING] = centres.all_of_windows(flags, kernels).expand(one.shape)
        return made

    def _each(self, source: Tensor, change: Callable[[Tensor], Tensor | None]) -> Coordinates:
        """The coordinates of a tensor, each changed; empty if one of them is lost."""
        changed = {axis: change(along) for axis, along in self.of(source).items()}
        kept = {axis: along for axis, along in changed.items() if along is not None}
        return kept if len(kept) == len(changed) else {}

    def _first(
        self, tensors: Iterable[Tensor], change: Callable[[Tensor], Tensor | None]
    ) -> Coordinates:
        return next((made for t in tensors if (made := self._each(t, change))), {})

    def _moved(
        self,
        func: Any,  # noqa: ANN401
        args: Arguments,
        kwargs: Keywords,
        results: list[Tensor],
    ) -> list[Coordinates]:
        """The coordinates of each result of a function that moves entries about."""
        tensors = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
        axes = {axis for tensor in tensors for axis in self.of(tensor)}
        moved: list[Coordinates] = [{} for _ in results]
        for axis in axes:
            alongs = [
                centres.nowhere(t) if (found := self.of(t).get(axis)) is None else found
                for t in tensors
            ]
            if len(alongs) == 1 and centres.is_one_number(alongs[0]):
                number = alongs[0][(0,) * alongs[0].dim()]
                made = [number.expand(tensor.shape) for tensor in results]
            else:
                narrow = _leaves_features(func, args, kwargs, [*alongs, *results])
                given = iter([along[..., :1] for along in alongs] if narrow else alongs)
                made = list(tensors_in((func(*_with(args, given), **_with(kwargs, given)),)))
                made = [m.expand(t.shape) for m, t in zip(made, results, strict=True)]
            for coordinates, along in zip(moved, made, strict=True):
                coordinates[axis] = along
        return moved

    def _padded(
        self, source: Tensor, pad: Iterable[int], mode: str = "constant", value: object = None
    ) -> Coordinates:
        """The coordinates go on along a straight line; what was added gets a flag."""
        del value
        sides = [int(side) for side in pad]
        grown = [
            (-number - 1, before, after)
            for number, (before, after) in enumerate(zip(sides[::2], sides[1::2], strict=True))
            if before or after
        ]
        if not grown:
            return self.of(source)
        if mode != "constant":
            return {}
        nothing = torch.zeros((1,) * source.dim(), device=source.device).expand(source.shape)
        made = self.of(source)
        made = {**made, PADDING: made.get(PADDING, nothing)}
        for side in grown:
            made = {axis: centres.padded(along, *side) for axis, along in made.items()}
            made[PADDING] = centres.flagged(made[PADDING], *side)
        return made

    def _einsum(self, equation: object, factors: list[Tensor], result: Tensor) -> Coordinates:
        if not isinstance(equation, str) or "->" not in equation or "..." in equation:
            return {}
        written, _, out = equation.replace(" ", "").partition("->")
        for letters, factor in zip(written.split(","), factors, strict=True):
            made = self._each(factor, partial(centres.of_einsum, letters, out, result))
            if made:
                return made
        return {}

    def _set(self, tensor: Tensor, coordinates: Coordinates) -> None:
        if coordinates and all(along.shape == tensor.shape for along in coordinates.values()):
            self._coordinates[tensor] = coordinates
        else:
            self._coordinates.pop(tensor, None)


def _own(tensor: Tensor) -> Coordinates:
    """Coordinates of an input: each entry's own index along each axis."""
    return {
        axis: torch.arange(size, dtype=torch.float32, device=tensor.device)
        .reshape(-1, *(1,) * (tensor.dim() - axis - 1))
        .expand(tensor.shape)
        for axis, size in enumerate(tensor.shape)
    }


def _with(given: Any, floats: Iterator[Tensor]) -> Any:  # noqa: ANN401
    """Arguments with others in place of their float tensors, in order."""
    if isinstance(given, dict):
        return {name: _with(value, floats) for name, value in given.items()}
    if isinstance(given, list | tuple):
        items = [_with(value, floats) for value in given]
        return items if isinstance(given, list) else tuple(items)
    return next(floats) if isinstance(given, Tensor) and given.is_floating_point() else given


def _leaves_features(
    func: Any,  # noqa: ANN401
    args: Arguments,
    kwargs: Keywords,
    tensors: list[Tensor],
) -> bool:
    """Whether a copying function may copy one feature for all: they are alike and stay last."""
    name = name_of(func)
    if name != "cat" and not (name == "roll" and (len(args) > 2 or "dims" in kwargs)):
        return False
    *alongs, result = tensors
    sizes = {tensor.shape[-1] for tensor in tensors}
    return result.dim() > 1 and len(sizes) == 1 and all(a.stride(-1) == 0 for a in alongs)


def _plain(name: str) -> str:
    """A function's name without the marks of operators and of changes in place."""
    if name.startswith("__"):
        bare = name.strip("_")
        plain = bare.removeprefix("r").removeprefix("i")
        return plain if plain in _KEEPS else ("matmul" if bare == "matmul" else name)
    return name.removesuffix("_")
