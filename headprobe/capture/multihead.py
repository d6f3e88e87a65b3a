"""What happens inside `F.multi_head_attention_forward`, worked out from its arguments.

It can't be watched from inside (it is one function to torch), and `nn.MultiheadAttention` uses its
`out_proj` as a weight without calling it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Keywords = dict[str, Any]

PARAMETERS = tuple(F.multi_head_attention_forward.__annotations__)[:-1]


def batch_first(tensor: Tensor) -> Tensor:
    """[batch, length, width] from torch's [length, batch, width], or from [length, width]."""
    return tensor[None] if tensor.dim() == 2 else tensor.transpose(0, 1)


def gated(given: Keywords, gate: Tensor) -> Keywords:
    """Arguments of multi_head_attention_forward with the heads' values multiplied by the gate."""
    width = given["out_proj_weight"].shape[1]
    if gate.shape[0] != 1:
        raise ValueError(
            f"a gate for nn.MultiheadAttention is [heads], got one per sequence: {gate.shape[0]}"
        )
    factor = gate.flatten().repeat_interleave(width // given["num_heads"])
    factor = factor.to(given["out_proj_weight"])
    changed = dict(given)
    if given.get("use_separate_proj_weight"):
        changed["v_proj_weight"] = given["v_proj_weight"] * factor[:, None]
    else:
        q_and_k, v = given["in_proj_weight"].split([2 * width, width])
        changed["in_proj_weight"] = torch.cat([q_and_k, v * factor[:, None]])
    if given.get("in_proj_bias") is not None:
        q_and_k, v = given["in_proj_bias"].split([2 * width, width])
        changed["in_proj_bias"] = torch.cat([q_and_k, v * factor])
    if given.get("bias_v") is not None:
        changed["bias_v"] = given["bias_v"] * factor
    if given.get("static_v") is not None:
        per_head = given["static_v"].unflatten(0, (-1, given["num_heads"]))
        changed["static_v"] = (per_head * gate).flatten(0, 1)
    return changed


def project(given: Keywords) -> Keywords:
    """Query, key, value and mask as multi_head_attention_forward makes them inside.

    Learned keys (`bias_k`) and a key of zeros (`add_zero_attn`) come after those of the sequence.
    """
    heads = given["num_heads"]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{side}_proj_weight"] for side in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if given.get("in_proj_bias") is None else given["in_proj_bias"].chunk(3)
    taken = [batch_first(given[name]) for name in ("query", "key", "value")]
    projected = [
        F.linear(side, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for side, weight, bias in zip(taken, weights, biases, strict=True)
    ]
    query, key, value = (
        side if given.get(static) is None else given[static].unflatten(0, (-1, heads))
        for side, static in zip(projected, ("", "static_k", "static_v"), strict=True)
    )
    extra = (given.get("bias_k") is not None) + bool(given.get("add_zero_attn"))
    mask = _mha_mask(given, len(query))
    if mask is not None and extra:
        mask = F.pad(mask, (0, extra), value=1 if mask.dtype == torch.bool else 0)
    return {
        "query": query,
        "key": torch.cat([key, *_added_keys(given, "bias_k", key)], dim=2),
        "value": torch.cat([value, *_added_keys(given, "bias_v", value)], dim=2),
        "mask": mask,
        "extra_keys": extra,
        "sink": extra > 0,
    }


def _added_keys(given: Keywords, bias: str, side: Tensor) -> list[Tensor]:
    """Keys or values that are no position of the sequence, each [batch, heads, 1, dim]."""
    batch, heads, _, dim = side.shape
    added = []
    if given.get(bias) is not None:
        added.append(given[bias].reshape(1, heads, 1, dim).expand(batch, -1, -1, -1))
    if given.get("add_zero_attn"):
        added.append(side.new_zeros(batch, heads, 1, dim))
    return added


def _mha_mask(given: Keywords, batch: int) -> Tensor | None:
    """One mask, True attends or a float that is added; in nn.MultiheadAttention True forbids."""
    mask: Tensor | None = given.get("attn_mask")
    padding: Tensor | None = given.get("key_padding_mask")
    if mask is not None:
        if mask.dim() == 3:
            mask = mask.unflatten(0, (batch, -1))
        mask = ~mask if mask.dtype == torch.bool else mask
    if padding is None:
        return mask
    padding = padding.reshape(batch, 1, 1, -1)
    padding = ~padding if padding.dtype == torch.bool else padding
    if mask is None:
        return padding
    if mask.dtype == torch.bool and padding.dtype == torch.bool:
        return mask & padding
    return _added(mask) + _added(padding)


def _added(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
