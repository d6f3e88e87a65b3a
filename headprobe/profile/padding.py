"""Left padding: tell the model the positions, and try out that it listens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headprobe.errors import HeadprobeError
from headprobe.profile.texts import Texts

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
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
    assert isinstance(mask, Tensor)
    return {**batch, "position_ids": (mask.long().cumsum(dim=1) - 1).clamp_min(0)}


def check_left_padding(model: nn.Module, texts: Texts) -> bool:
    """Run one left-padded text alone and compare; True if there was one to try.

    Raises:
        HeadprobeError: if the model's output for the text changes with its padding.
    """
    inputs = texts.inputs
    mask = inputs.get("attention_mask")
    if not _is_left_padded(mask):
        return False
    assert isinstance(mask, Tensor)
    text = int((~mask.bool()).sum(dim=1).argmax())
    tokens = mask[text].bool()
    alone = {
        name: value[text : text + 1, tokens] if _is_like(value, mask) else value[text : text + 1]
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name != "position_ids"
    }
    padded_output = _first_tensor(model(**inputs))[text]
    alone_output = _first_tensor(model(**alone))[0]
    if padded_output.shape[:1] == tokens.shape:
        padded_output = padded_output[tokens]
    if padded_output.shape != alone_output.shape:
        return True
    scale = float(alone_output.abs().max().clamp_min(1e-6))
    error = float((padded_output - alone_output).abs().max()) / scale
    if error > _TOLERANCE.get(alone_output.dtype, _LOW_PRECISION_TOLERANCE):
        raise HeadprobeError(
            "the texts are padded on the left and the model's output changes with the padding "
            f"(by {error:.2g} of its largest entry): it counts positions from the start of the "
            "padding and takes no position_ids; pad on the right"
        )
    return True


def _is_left_padded(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())


def _is_like(value: Tensor, mask: Tensor) -> bool:
    return value.shape[:2] == mask.shape


def _first_tensor(output: Any) -> Tensor:  # noqa: ANN401
    """The model's main output, in whatever it is wrapped."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output
