"""From module names to the layer and the stack that people speak of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a layer stands.

    Attributes:
        stack: tells streams apart (`encoder`, `decoder`, `text`); empty where there is one.
        layer: the block's index as the model numbers it.
    """

    stack: str
    layer: int


def places(sites: Sequence[str], kinds: Sequence[str]) -> list[Place]:
    """Stack and layer of each attention call.

    The layer is the number in the module's name. Where that doesn't tell the calls of a stack and
    kind apart (one module called again and again, stages with blocks of their own), they are
    numbered in the order in which the model calls them.

    Args:
        sites: module names, as in `model.named_modules()`, in the order of the calls.
        kinds: the kind of attention of each.

    Example:
        >>> places(["encoder.layer.0.attn", "encoder.layer.1.attn"], ["causal"] * 2)
        [Place(stack='', layer=0), Place(stack='', layer=1)]
    """
    alike = defaultdict(list)
    for site, kind in zip(sites, kinds, strict=True):
        alike[kind].append(site)
    split = [
        _container_and_number(site, alike[kind]) for site, kind in zip(sites, kinds, strict=True)
    ]
    stacks = _stacks([container for container, _ in split])
    members = defaultdict(list)
    for index, (stack, kind) in enumerate(zip(stacks, kinds, strict=True)):
        members[stack, kind].append(index)
    layers = [0] * len(sites)
    for indices in members.values():
        numbers = [split[index][1] for index in indices]
        if None in numbers or len(set(numbers)) < len(numbers):
            numbers = list(range(len(indices)))
        for index, number in zip(indices, numbers, strict=True):
            layers[index] = number or 0
    return [Place(stack, layer) for stack, layer in zip(stacks, layers, strict=True)]


def _container_and_number(site: str, sites: Sequence[str]) -> tuple[str, int | None]:
    """The path before the block's number, and the number.

    It is the first number that differs between modules of a kind with the same path before it.
    Where none does there is one block: then it is the first number after a name, since a number at
    the start belongs to a wrapper.
    """
    parts = site.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    for i in numbered:
        before = parts[:i]
        values = {
            other.split(".")[i]
            for other in sites
            if other.split(".")[:i] == before and len(other.split(".")) > i
        }
        if len(values) > 1:
            return ".".join(before), int(parts[i])
    if numbered:
        i = next((i for i in numbered if i), numbered[0])
        return ".".join(parts[:i]), int(parts[i])
    return site, None


def _stacks(containers: Sequence[str]) -> list[str]:
    """The first part of the paths in which the containers differ; empty if they don't."""
    paths = [container.split(".") for container in containers]
    if len({tuple(path) for path in paths}) == 1:
        return [""] * len(paths)
    depth = 0
    while len({tuple(path[: depth + 1]) for path in paths}) == 1:
        depth += 1
    return [".".join(path[depth : depth + 1]).removesuffix("_model") for path in paths]
