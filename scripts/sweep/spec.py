"""What is known of a tiny model before it runs: its config, and its forward's parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from scripts.sweep.configs import VOCABULARY

BATCH = 2
LENGTH = 12
PADDED = 3

Inputs = dict[str, Any]

IMAGE_TOKEN = re.compile(r"(image|img|im|media)_(patch_|soft_)?token_(id|index)|boi_token_id")
AUDIO_TOKEN = re.compile(r"(audio|speech)_(soft_)?token_(id|index)")


class Spec:
    """What is known of a model: its config with all parts, and its forward's parameters."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.required = {
            name
            for name, parameter in self.parameters.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }
        main = model.main_input_name
        self.main = main if isinstance(main, str) else main[0]
        self.parts = list(_parts(model.config))

    def find(self, *names: str, default: Any = None) -> Any:  # noqa: ANN401
        """The first setting of one of these names, in the config or its parts."""
        for name in names:
            for part in self.parts:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    def integer(self, *names: str, default: int = 64) -> int:
        """The same, where it is one number."""
        found = self.find(*names)
        return found if isinstance(found, int) else default

    def special_ids(self) -> set[int]:
        """Token ids that mean something."""
        found: set[int] = set()
        for part in self.parts:
            for name, value in vars(part).items():
                if re.fullmatch(r".*(token_id|token_index|_id)", name):
                    found |= {value} if isinstance(value, int) else set()
        return found

    def token(self, pattern: re.Pattern[str]) -> int | None:
        """The id that stands for an image or a sound in the text."""
        for part in self.parts:
            for name, value in vars(part).items():
                if pattern.fullmatch(name) and isinstance(value, int):
                    return value
        return None


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def ids(spec: Spec, length: int = LENGTH) -> Tensor:
    top = min(spec.find("vocab_size", default=VOCABULARY) or VOCABULARY, 100)
    allowed = [i for i in range(3, max(top, 5)) if i not in spec.special_ids()] or [1]
    return torch.tensor(allowed)[torch.randint(len(allowed), (BATCH, length))]
