"""Left padding: tell the model the positions, and try out that it listens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from headprobe.errors import HeadprobeError

_MASKS = ("attention_mask", "decoder_attention_mask")
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1


class Padding:
    """Sees to it that padding changes nothing: tried out once, on one text.

    A model gets the positions of left-padded texts if it needs them.

    Args:
        model: in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._needs_positions: bool | None = None
        self._checked = False

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch, perhaps with `position_ids` that count a text's tokens from 0.

        Raises:
            HeadprobeError: if the model's output for a text changes with its padding all the same.
        """
        inputs = dict(batch)
        if not any(_is_left_padded(inputs.get(name)) for name in _MASKS):
            return inputs
        if self._needs_positions is None:
            self._needs_positions = self._try(inputs)
        return self._with_positions(inputs) if self._needs_positions else inputs

    def check(self, inputs: Mapping[str, Any], output: object) -> None:
        """Compare the first padded batch's output for a text with that of the text alone.

        Args:
            inputs: the batch as it was run.
            output: what the model gave.

        Raises:
            HeadprobeError: if they differ.
        """
        masks = [mask for name in _MASKS if _is_padded(mask := inputs.get(name))]
        if self._checked or not masks or any(_has_holes(mask) for mask in masks):
            return
        self._checked = True
        error = difference_alone(self._model, inputs, output)
        if error is not None and not error <= output_tolerance(self._model):
            raise HeadprobeError(
                f"padding changes the model's output for a text (by {error:.2g} of its largest "
                "entry), whatever the mask says: give texts of one length, or one text at a time "
                "(--batch-size 1)"
            )

    def _try(self, inputs: dict[str, Any]) -> bool:
        """Run the most padded text alone and compare, without and with positions."""
        tolerance = output_tolerance(self._model)
        error = difference_alone(self._model, inputs)
        if error is None:
            raise HeadprobeError(
                "the texts are padded on the left and the model has no output for a single text, "
                "so it can't be tried out whether the padding matters: pad on the right"
            )
        if error <= tolerance:
            return False
        given = self._with_positions(inputs)
        if given.keys() != inputs.keys():
            error = difference_alone(self._model, given)
            if error is not None and error <= tolerance:
                return True
        raise HeadprobeError(
            "the texts are padded on the left and the model's output changes with the padding "
            f"(by {error:.2g} of its largest entry): it counts positions from the start of the "
            "padding and takes no position_ids, or doesn't use the mask; pad on the right"
        )

    def _with_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        mask = inputs.get("attention_mask")
        takes = "position_ids" in inspect.signature(self._model.forward).parameters
        if "position_ids" in inputs or not takes or not _is_left_padded(mask):
            return inputs
        return {**inputs, "position_ids": (mask.long().cumsum(dim=1) - 1).clamp_min(0)}


@torch.no_grad()
def difference_alone(
    model: nn.Module, inputs: Mapping[str, Any], output: object = None
) -> float | None:
    """How far the model's output for the most padded text moves when that text runs alone.

    Args:
        model: in eval mode.
        inputs: a batch, batch first.
        output: what the model gave for it; None to run it.

    Returns:
        The largest difference over the largest entry; None if no mask says that there is padding,
        or no output belongs to single texts.
    """
    masks = {name: inputs.get(name) for name in _MASKS}
    padded = [mask for mask in masks.values() if _is_padded(mask)]
    if not padded:
        return None
    text = int((padded[0] == 0).sum(dim=1).argmax())
    has_decoder = any(name.startswith("decoder_") for name in inputs)
    mask = masks["decoder_attention_mask" if has_decoder else "attention_mask"]
    together = _tensors(model(**inputs) if output is None else output)
    try:
        alone = list(_tensors(model(**_alone(inputs, text, masks))))
    except Exception:  # its other inputs can't be told apart by texts
        return None
    for whole, one in zip(together, alone, strict=False):
        if whole.shape[0] == len(padded[0]) and one.shape[0] == 1:
            part = _of_text(whole[text], None if mask is None else mask[text].bool())
            error = None if part is None else difference(part, one[0])
            if error is not None:
                return error
    return None


def _of_text(part: Tensor, mask: Tensor | None) -> Tensor | None:
    """A text's part of an output without its padding; None if it is of one position of many."""
    if mask is not None and part.shape[:1] == mask.shape:
        return part[mask]
    # Of the last position, say, which in a padded text is another one.
    return None if part.dim() > 1 and len(part) == 1 else part


def output_tolerance(model: nn.Module) -> float:
    """How far two outputs that should be the same may differ, relative to the largest entry."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return _TOLERANCE if kinds <= {torch.float32, torch.float64} else _LOW_PRECISION_TOLERANCE


def _alone(
    inputs: Mapping[str, Any], text: int, masks: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """The inputs of one text of the batch without its padding, for the model to count positions."""
    alone = {}
    texts = next(len(mask) for mask in masks.values() if mask is not None)
    for name, value in inputs.items():
        if name == "position_ids":
            continue
        mask = masks["decoder_attention_mask" if name.startswith("decoder_") else "attention_mask"]
        if isinstance(value, Tensor) and value.dim() and len(value) == texts:
            value = value[text : text + 1]
            if mask is not None and value.shape[1:2] == mask.shape[1:]:
                value = value[:, mask[text].bool()]
        alone[name] = value
    return alone


def difference(first: Tensor, second: Tensor) -> float | None:
    """Largest difference of two outputs over the largest entry; None if they don't compare."""
    if first.shape != second.shape or not first.is_floating_point():
        return None
    if not bool((first.isfinite() & second.isfinite()).all()):
        return None
    return float((first - second).abs().max() / second.abs().max().clamp_min(1e-6))


def _is_padded(mask: object) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 0).any())


def _has_holes(mask: Tensor) -> bool:
    """Whether a text has hidden tokens between others: without them it would be another text."""
    steps = mask.bool().int().diff(dim=1, prepend=mask.new_zeros(len(mask), 1).int())
    return bool(((steps == 1).sum(dim=1) > 1).any())


def _is_left_padded(mask: object) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())


def first_tensor(output: object) -> Tensor:
    """The model's main output, in whatever it is wrapped; a loss is not one."""
    return next(_tensors(output))


def _tensors(output: object) -> Iterator[Tensor]:
    """The tensors with axes in a model's output, in whatever they are wrapped."""
    if isinstance(output, Tensor):
        if output.dim():
            yield output
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
