"""How to make a config small: some ways, for no single one fits all models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

IMAGE = 32


@dataclass(frozen=True)
class Sizes:
    """How to make a config small.

    Attributes:
        name: of this way.
        width: given a width, the small one.
        heads: given a number of heads, the small one.
        head_width: given the width of a head, the small one.
        inner: given the inner width of a feed-forward part, the small one.
        kv_heads: given a number of key heads fewer than heads, the small one.
        limit: at most this many parameters.
        image: the size of images; None for the default.
    """

    name: str
    width: Callable[[int], int]
    heads: Callable[[int], int]
    head_width: Callable[[int], int]
    inner: Callable[[int], int]
    kv_heads: Callable[[int], int]
    limit: float
    image: int | None = IMAGE


def _divided(factor: int) -> Callable[[int], int]:
    return lambda size: size // factor if size % factor == 0 and size // factor >= 2 else size


def _same(size: int) -> int:
    return size


def scaled(factor: int, limit: float, image: int | None = IMAGE) -> Sizes:
    """Every width divided by one factor, so that what has to fit together still does."""
    by = _divided(factor)
    return Sizes(f"widths / {factor}", by, _same, by, by, _same, limit, image)


def _few(heads: int) -> int:
    return min(heads, 2) if heads < 4 else 4


FIXED = Sizes(
    "fixed sizes",
    width=lambda size: min(size, 32),
    heads=_few,
    head_width=lambda size: min(size, 8),
    inner=lambda size: min(size, 64),
    kv_heads=lambda heads: min(heads, 2),
    limit=1.6e7,
)

WHOLE_HEADS = Sizes(
    "few heads of the full width",
    width=lambda size: min(size, 512),
    heads=_few,
    head_width=_same,
    inner=lambda size: min(size, 64),
    kv_heads=lambda heads: min(heads, 2),
    limit=2e7,
)

# Tried in this order, until one makes a model that runs.
LADDER = (
    FIXED,
    scaled(16, 5e6),
    scaled(8, 5e6),
    WHOLE_HEADS,
    scaled(4, 2e7),
    scaled(2, 6e7),
    scaled(1, 1e8),
    scaled(1, 1e8, image=None),
)
