"""Attention in a kernel that can be seen, for as long as a model is watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SEEN = (None, "eager", "sdpa")


@contextmanager
def seen_kernels(model: nn.Module) -> Iterator[dict[str, str]]:
    """Switch what computes attention in a closed kernel to plain torch; restored at the end.

    Looked for is what transformers models keep in their configurations, `_attn_implementation`.
    They read it, and make the mask that belongs to it, anew in each forward pass.

    Args:
        model: any module; one without such configurations is left alone.

    Yields:
        The kernels that were switched: name -> `sdpa`, or `eager` where the model has no sdpa.
    """
    found = _configurations(model)
    switched: dict[str, str] = {}
    try:
        for config, before, instead in found:
            if before not in _SEEN:
                config._attn_implementation = instead
                switched[before] = instead
        yield switched
    finally:
        # Setting one sets those inside it too: all are set, the inner ones last.
        for config, before, _ in found if switched else ():
            config._attn_implementation = before


def _configurations(model: nn.Module) -> list[tuple[Any, Any, str]]:
    """Each configuration, outer ones first, with its kernel and the one to use instead."""
    found: dict[int, tuple[Any, Any, str]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and id(config) not in found:
            instead = "sdpa" if getattr(module, "_supports_sdpa", True) else "eager"
            found[id(config)] = config, config._attn_implementation, instead
    return list(found.values())
