"""A tiny model of any type."""

from __future__ import annotations

import importlib
import math
import re

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

from scripts.sweep.configs import Sizes, tiny

# Where a type's class is looked up, in this order: the model without a head first.
_MAPPINGS = (
    "MODEL",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_PRETRAINING",
    "MODEL_FOR_BACKBONE",
)


class NotBuilt(Exception):
    """No tiny model of a type could be made; the message says why."""


def model_types() -> dict[str, tuple[str, ...]]:
    """Every model type of the installed transformers, and the names of its classes, in order."""
    names = sorted(name for name in dir(modeling_auto) if re.fullmatch("MODEL_.*_NAMES", name))
    first = [f"{mapping}_MAPPING_NAMES" for mapping in _MAPPINGS]
    types: dict[str, dict[str, None]] = {}
    for mapping in (*first, *names):
        for kind, name in getattr(modeling_auto, mapping).items():
            if kind in configuration_auto.CONFIG_MAPPING_NAMES:
                classes = (name,) if isinstance(name, str) else name
                types.setdefault(kind, {}).update(dict.fromkeys(classes))
    return {kind: tuple(classes) for kind, classes in sorted(types.items())}


def config_class(kind: str) -> type[PreTrainedConfig]:
    """The config class of a model type."""
    return configuration_auto.CONFIG_MAPPING[kind]


def model_class(kind: str, name: str = "") -> type[PreTrainedModel]:
    """A class of a model type, the first if no name is given."""
    name = name or model_types()[kind][0]
    found = getattr(transformers, name, None)
    if found is None:
        module = config_class(kind).__module__.replace(".configuration_", ".modeling_")
        found = getattr(importlib.import_module(module), name)
    if not issubclass(found, PreTrainedModel):
        raise NotBuilt(f"{name} needs a package that is not installed")
    return found


def parameters_of(cls: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """How many parameters a model would have, without making them."""
    with torch.device("meta"):
        model = cls(config)
    return sum(parameter.numel() for parameter in model.parameters())


def build(kind: str, name: str, attention: str, sizes: Sizes) -> PreTrainedModel:
    """A tiny model of a type, in eval mode, with weights that make its heads differ.

    Args:
        kind: the model type.
        name: its class.
        attention: `sdpa` or `eager`.
        sizes: how to make it small.
    """
    cls = model_class(kind, name)
    config = tiny(config_class(kind), sizes)
    config._attn_implementation = attention
    count = parameters_of(cls, config)
    if count > sizes.limit:
        raise NotBuilt(f"{count / 1e6:.0f} million parameters ({sizes.name})")
    torch.manual_seed(0)
    model = cls(config)
    return spread(model).eval()


@torch.no_grad()
def spread(model: nn.Module) -> nn.Module:
    """Move all weights, so that the attention is not uniform, as a trained model's isn't."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.dim() < 2:
            continue
        fan_in = parameter.numel() // parameter.shape[0]
        parameter += torch.randn_like(parameter) * 0.7 / math.sqrt(fan_in)
    return model
