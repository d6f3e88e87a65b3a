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


def keys_that_are_no_token(given: Keywords) -> str:
    """The arguments that add keys beside those of the sequence; empty if there are none."""
    extra = [name for name in ("bias_k", "static_k", "static_v") if given.get(name) is not None]
    return ", ".join(extra + ["add_zero_attn"] * bool(given.get("add_zero_attn")))


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
    return changed


def project(given: Keywords) -> Keywords:
    """Query, key, value and mask as multi_head_attention_forward makes them inside."""
    heads = given["num_heads"]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{side}_proj_weight"] for side in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if given.get("in_proj_bias") is None else given["in_proj_bias"].chunk(3)
    sides = [batch_first(given[name]) for name in ("query", "key", "value")]
    projected = [
        F.linear(side, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for side, weight, bias in zip(sides, weights, biases, strict=True)
    ]
    names = ("query", "key", "value")
    return dict(zip(names, projected, strict=True)) | {"mask": _mha_mask(given, len(sides[0]))}


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
