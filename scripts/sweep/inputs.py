"""What a tiny model is run on, made from the names of its forward's parameters and its config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scripts.sweep.images import (
    channels_of,
    image_sizes,
    images,
    images_and_text,
    patch_rows,
    videos,
)
from scripts.sweep.sound import series, sound_features, waves
from scripts.sweep.spec import BATCH, LENGTH, Inputs, Spec, ids
from scripts.sweep.text import text


def candidates(model: PreTrainedModel) -> Iterator[tuple[str, Inputs]]:
    """Names of kinds of inputs and the inputs, the most complete first."""
    spec = Spec(model)
    for kind, make in _KINDS.items():
        for inputs in make(spec):
            torch.manual_seed(0)
            yield kind, _complete(spec, inputs)


def _complete(spec: Spec, inputs: Inputs) -> Inputs:
    """The inputs with all that the forward can't do without."""
    for name in spec.required - inputs.keys():
        make = _OTHERS.get(name)
        if make is not None:
            inputs[name] = make(spec)
    if "mm_token_type_ids" in spec.parameters and "input_ids" in inputs:
        inputs.setdefault("mm_token_type_ids", torch.zeros_like(inputs["input_ids"]))
    return inputs


def _embedded(spec: Spec) -> Iterator[Inputs]:
    width = spec.integer("hidden_size", "d_model", "n_embd", "embed_dim", default=32)
    hidden = torch.randn(BATCH, LENGTH, width)
    for name in ("inputs_embeds", "hidden_states", "query_embeds", "inputs", "latents"):
        if name in spec.parameters:
            yield {name: hidden}
    if "states" in spec.parameters:  # decisions: what was seen, done and earned
        state, action = int(spec.find("state_dim")), int(spec.find("act_dim"))
        yield {
            "states": torch.randn(BATCH, LENGTH, state),
            "actions": torch.randn(BATCH, LENGTH, action),
            "rewards": torch.randn(BATCH, LENGTH, 1),
            "returns_to_go": torch.randn(BATCH, LENGTH, 1),
            "timesteps": torch.arange(LENGTH).expand(BATCH, -1),
            "attention_mask": torch.ones(BATCH, LENGTH),
        }


def _pixels(spec: Spec) -> Tensor:
    return torch.randn(BATCH, channels_of(spec), *image_sizes(spec)[0])


_OTHERS: dict[str, Callable[[Spec], Any]] = {
    "grid_thw": lambda spec: torch.tensor([[1, 4, 4]] * BATCH),
    "merge_sizes": lambda spec: torch.tensor([2] * BATCH),
    "input_ids": ids,
    "qformer_input_ids": ids,
    "attention_mask": lambda spec: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "task_inputs": lambda spec: torch.randint(
        1, 90, (BATCH, spec.find("task_seq_len", default=77))
    ),
    "prompt_pixel_values": _pixels,
    "prompt_masks": _pixels,
    "audio_mel": lambda spec: torch.randn(BATCH, 64, spec.find("input_feat_size", default=80)),
    "audio_mel_mask": lambda spec: torch.zeros(BATCH, 64, dtype=torch.bool),
    "past_values_padding": lambda spec: torch.zeros(
        BATCH, int(spec.find("context_length", default=32))
    ),
    "freq": lambda spec: torch.zeros(BATCH, 1, dtype=torch.long),
}

_KINDS: dict[str, Callable[[Spec], Iterator[Inputs]]] = {
    "images and text": images_and_text,
    "sound": sound_features,
    "waves": waves,
    "text": text,
    "patches": patch_rows,
    "images": images,
    "videos": videos,
    "series": series,
    "embeddings": _embedded,
}
