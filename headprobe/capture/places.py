"""Where the positions of an attention call lie in the model's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from headprobe.capture import centres
from headprobe.capture.flow import LEARNED
from headprobe.capture.following import PADDING, Coordinates, Following

if TYPE_CHECKING:
    from headprobe.capture.call import AttentionCall

Unit = Literal["tokens", "positions", "frames", "pixels", ""]

_PLANE = 2  # axes of a picture
_PICTURE = 4  # axes of a batch of pictures with channels
_OF_PICTURES = ("pixel", "patch", "image")  # in the names of inputs


@dataclass(frozen=True, eq=False)
class Places:
    """Where the positions of a call whose queries and keys are the same positions lie.

    Attributes:
        unit: of distances: tokens, positions of a sequence of vectors, frames (steps along the last
            axis of an input, or along one that a convolution slid over), pixels of a picture; empty
            if there is no distance, or none is known.
        reason: why no distance is known.
        coordinates: [sequences, positions, axes] in these units, NaN for a position that comes
            from no place of the input ([CLS]); None where position i lies at i.
        sequences: which of the model's sequences each of the map's is a window of, [sequences];
            None if the map has those that the model was given, in their order.
        padded: whether some positions are nothing but padding that the model added itself.
    """

    unit: Unit
    reason: str = ""
    coordinates: Tensor | None = None
    sequences: Tensor | None = None
    padded: bool = False


TOKENS = Places("tokens")


def places_of(call: AttentionCall, following: Following) -> Places:
    """Where a call's positions lie, as far as the data flow proves it."""
    stream = call.streams[0]
    if stream != call.streams[1] or call.queries != call.keys or call.value is None:
        return Places("")  # no key is a query: there is no distance
    shape = following.inputs.get(stream or "")
    if shape is None:
        if stream is None and following.convolved:
            return Places("", "it can't be told from which input its positions come")
        return Places("positions") if stream in (None, LEARNED) else TOKENS
    queries = call.weights if call.weights is not None else call.query
    found = _positions(following.of(queries), call.keys)
    if not found or not _alike(found, _positions(following.of(call.value), call.keys)):
        is_sequence = len(shape) < _PICTURE and not following.convolved
        if not is_sequence or call.queries not in shape[:-1]:
            return Places("", "its positions could not be followed to places of the input")
        placed = Places("positions")
    else:
        placed = _placed(found, tuple(shape), following.convolved)
    if placed.unit == "positions" and any(word in str(stream) for word in _OF_PICTURES):
        return Places("", "its input is ready patches: where they lie is not told")
    return placed


def _placed(found: Coordinates, shape: tuple[int, ...], convolved: bool) -> Places:
    axes = [axis for axis in range(len(shape)) if axis in found and _varies(found[axis])]
    if not 1 <= len(axes) <= _PLANE:
        return Places("", f"its positions lie along {len(axes)} axes of the input, not 1 or 2")
    coordinates = torch.stack([found[axis] for axis in axes], dim=-1)
    batch = next((axis for axis in range(len(shape)) if axis not in axes), None)
    sequences = _sequences(coordinates, None if batch is None else found.get(batch))
    if isinstance(sequences, str):
        return Places("", sequences)
    is_padding = PADDING in found and bool((found[PADDING] == 1).any())
    if len(axes) == _PLANE or len(shape) >= _PICTURE:
        return Places("pixels", "", coordinates, sequences, is_padding)
    index = torch.arange(coordinates.shape[1], device=coordinates.device)
    if axes[0] < len(shape) - 1 and bool((coordinates[..., 0] == index).all()):
        return Places("positions", "", None, sequences, is_padding)
    unit: Unit = "frames" if convolved or axes[0] == len(shape) - 1 else "positions"
    return Places(unit, "", coordinates, sequences, is_padding)


def _positions(coordinates: Coordinates, positions: int) -> Coordinates:
    """Coordinates per position, [sequences, positions]; empty if heads or features disagree."""
    found = {}
    for axis, along in coordinates.items():
        here = along[:, :, :positions]
        differing = centres.one_of_each(here)
        one = differing[:, :1, :, :1]
        if not bool(((differing == one) | (differing.isnan() & one.isnan())).all()):
            return {}
        found[axis] = here[:, 0, :, 0]
    return found


def _alike(queries: Coordinates, keys: Coordinates) -> bool:
    """Whether query i lies where key i lies."""
    return queries.keys() == keys.keys() and all(
        along.shape == keys[axis].shape and torch.allclose(along, keys[axis], equal_nan=True)
        for axis, along in queries.items()
    )


def _varies(along: Tensor) -> bool:
    """Whether the positions of a sequence lie at different places of an axis."""
    low = along.nan_to_num(nan=torch.inf).amin(dim=1)
    high = along.nan_to_num(nan=-torch.inf).amax(dim=1)
    return bool((high > low).any())


def _sequences(coordinates: Tensor, along: Tensor | None) -> Tensor | str | None:
    """Which of the model's sequences each of the map's belongs to; None if it is one each."""
    if len(coordinates) == 1:
        return None
    if along is None or _varies(along):
        return "its sequences can't be told apart"
    number = along.nan_to_num(nan=-1.0).amax(dim=1)
    if bool((number < 0).any()) or bool((number != number.round()).any()):
        return "its sequences can't be told apart"
    order = torch.arange(len(number), device=number.device)
    return None if bool((number == order).all()) else number.long()
