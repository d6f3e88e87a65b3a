"""How the tensors of an attention call are laid out, brought to [batch, heads, length, dim]."""

from __future__ import annotations

import torch
from torch import Tensor

from headprobe.capture.call import visible_keys

Axes = tuple[int, ...]


def four_axes(tensor: Tensor, batch: int | None) -> Tensor | None:
    """[batch, heads, length, dim] from [batch * heads, length, dim] and the like.

    Args:
        tensor: query, key, value, weights or output.
        batch: number of sequences, if it is known.

    Returns:
        A view or copy with four axes, or None if batch and heads can't be told apart.
    """
    unfolded: Tensor | None = None
    if tensor.dim() == 4:
        unfolded = tensor
    elif tensor.dim() > 4:
        unfolded = tensor.flatten(1, -3)
    elif tensor.dim() == 2:
        unfolded = tensor[None, None]
    elif tensor.dim() == 3 and batch and tensor.shape[0] % batch == 0:
        unfolded = tensor.unflatten(0, (batch, -1))
    return unfolded


def mask_axes(mask: Tensor, query: Tensor, batch: int | None) -> Tensor | None:
    """A mask that broadcasts to [*query.shape[:-1], keys], for the query with four axes."""
    if query.dim() > 4:
        missing = (1,) * (query.dim() - mask.dim())
        full = mask.reshape(*missing, *mask.shape)
        # Broadcasting doesn't survive the flattening of axes: it is done before.
        return four_axes(full.expand(*query.shape[:-2], -1, -1), batch)
    if query.dim() == 3 and mask.dim() == 3 and len(mask) == len(query):
        return four_axes(mask, batch)
    return mask


def einsum_axes(equation: str, axes: int) -> tuple[Axes, Axes] | None:
    """The order of axes that turns what einsum took and gave into [.., length, dim].

    Args:
        equation: of einsum(equation, weights, values), for example "bhqk,bkhd->bqhd".
        axes: how many axes the weights have; tells what "..." stands for.

    Returns:
        The permutation of the values and that of the result, or None if this is not the plain
        sum over the keys, the weights' last axis.
    """
    named = equation.replace(" ", "").partition(",")[0].replace(".", "")
    written = equation.replace(" ", "").replace("...", "ABCDEF"[: axes - len(named)])
    factors, _, result = written.partition("->")
    weights, _, values = factors.partition(",")
    leading, queries, keys = weights[:-2], weights[-2:-1], weights[-1:]
    features = [axis for axis in values if axis not in weights]
    if len(features) != 1 or queries in values or keys in result:
        return None
    shared = "".join(axis for axis in leading if axis in values)  # not the group of shared keys
    if not leading.startswith(shared):
        return None
    values_order = _order(values, shared + keys + features[0])
    result_order = _order(result, leading + queries + features[0])
    return (values_order, result_order) if values_order and result_order else None


def _order(given: str, wanted: str) -> Axes | None:
    if sorted(given) != sorted(wanted):
        return None
    return tuple(given.index(axis) for axis in wanted)


def unstack(tensor: Tensor, queries: int) -> Tensor:
    """[batch, heads, queries, ..] from [batch, kv_heads, group * queries, ..].

    Heads that share keys and values may be stacked, so that one product serves them all.
    """
    unstacked: Tensor = tensor.unflatten(2, (-1, queries)).flatten(1, 2)
    return unstacked


@torch.no_grad()
def visible_in_scores(scores: Tensor | None, weights: Tensor) -> Tensor:
    """What the mask left visible, read off the scores; kept for one head where heads agree."""
    if scores is None or scores.shape[-2:] != weights.shape[-2:]:
        return weights > 0
    visible = visible_keys(scores).reshape(weights.shape)
    if bool((visible == visible[:, :1]).all()):
        return visible[:, :1].clone()
    return visible


def is_weight(tensor: Tensor) -> bool:
    """Whether a factor of a product looks like a weight of the model, not like an activation."""
    return tensor.dim() <= 2 or isinstance(tensor, torch.nn.Parameter)
