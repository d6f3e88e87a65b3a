"""Left padding: tell the model the positions, and try out that it listens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from headprobe.errors import HeadprobeError
from headprobe.profile.texts import Texts

_MASKS = ("attention_mask", "decoder_attention_mask")
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1


def with_positions(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch, with `position_ids` that count a left-padded text's tokens from 0.

    Only if there is left padding, no `position_ids` yet, and the model's forward takes them.
    """
    mask = batch.get("attention_mask")
    if not _is_left_padded(mask) or "position_ids" in batch:
        return dict(batch)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return dict(batch)
    return {**batch, "position_ids": (mask.long().cumsum(dim=1) - 1).clamp_min(0)}


def check_left_padding(model: nn.Module, texts: Texts) -> bool:
    """Run one left-padded text alone and compare; True if there was one to try.

    Raises:
        HeadprobeError: if the model's output for the text changes with its padding.
    """
    if not any(_is_left_padded(texts.inputs.get(name)) for name in _MASKS):
        return False
    error = difference_alone(model, texts.inputs)
    if error is not None and not error <= output_tolerance(model):
        raise HeadprobeError(
            "the texts are padded on the left and the model's output changes with the padding "
            f"(by {error:.2g} of its largest entry): it counts positions from the start of the "
            "padding and takes no position_ids, or doesn't use the mask; pad on the right"
        )
    return True


@torch.no_grad()
def difference_alone(model: nn.Module, inputs: Mapping[str, Any]) -> float | None:
    """How far the model's output for the most padded text moves when that text runs alone.

    Args:
        model: in eval mode.
        inputs: a batch, batch first.

    Returns:
        The largest difference over the largest entry; infinite if the outputs have other shapes,
        None if no mask says that there is padding.
    """
    masks = {name: inputs.get(name) for name in _MASKS}
    padded = [
        m for m in masks.values() if isinstance(m, Tensor) and m.dim() == 2 and (m == 0).any()
    ]
    if not padded:
        return None
    text = int((padded[0] == 0).sum(dim=1).argmax())
    padded_output = first_tensor(model(**inputs))[text]
    alone_output = first_tensor(model(**_alone(inputs, text, masks)))[0]
    has_decoder = any(name.startswith("decoder_") for name in inputs)
    mask = masks["decoder_attention_mask" if has_decoder else "attention_mask"]
    if isinstance(mask, Tensor) and padded_output.shape[:1] == mask.shape[1:]:
        padded_output = padded_output[mask[text].bool()]
    return difference(padded_output, alone_output)


def output_tolerance(model: nn.Module) -> float:
    """How far two outputs that should be the same may differ, relative to the largest entry."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return _TOLERANCE if kinds <= {torch.float32, torch.float64} else _LOW_PRECISION_TOLERANCE


def _alone(
    inputs: Mapping[str, Any], text: int, masks: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """The inputs of one text of the batch without its padding, for the model to count positions."""
    alone = {}
    for name, value in inputs.items():
        if name == "position_ids":
            continue
        mask = masks["decoder_attention_mask" if name.startswith("decoder_") else "attention_mask"]
        if isinstance(value, Tensor) and value.dim():
            value = value[text : text + 1]
            if mask is not None and value.shape[1:2] == mask.shape[1:]:
                value = value[:, mask[text].bool()]
        alone[name] = value
    return alone


def difference(first: Tensor, second: Tensor) -> float:
    """Largest difference of two outputs over the largest entry; infinite if they don't compare."""
    if first.shape != second.shape:
        return float("inf")
    return float((first - second).abs().max() / second.abs().max().clamp_min(1e-6))


def _is_left_padded(mask: object) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())


def first_tensor(output: Any) -> Tensor:  # noqa: ANN401
    """The model's main output, in whatever it is wrapped; a loss is not one."""
    while not isinstance(output, Tensor):
        parts = output.values() if isinstance(output, Mapping) else output
        output = next(part for part in parts if not isinstance(part, Tensor) or part.dim())
    return output
