"""Attention in one function: the sdpa kernel, and what nn.MultiheadAttention calls.

Each seam runs the model's own function with its own arguments and returns its own result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headprobe.capture import multihead
from headprobe.capture.call import AttentionCall, OutputProjection
from headprobe.capture.flow import Trace
from headprobe.capture.layout import four_axes, mask_axes
from headprobe.capture.watch import (
    FOLDED,
    PAD_THEM,
    Arguments,
    Keywords,
    Watch,
    beside_the_model,
)

_SDPA_PARAMETERS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


def sdpa(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
    """The fused kernel: the weights can be rebuilt from its arguments."""
    result: Tensor = func(*args, **kwargs)
    given = dict(zip(_SDPA_PARAMETERS, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    streams = (watch.traces.of(query).stream, watch.traces.of(key).stream)
    site = watch.running.site
    if query.is_nested:
        watch.unreadable(site, f"the sequences are nested tensors; {PAD_THEM}")
        return result
    batch = watch.sequences(streams[0], query.shape[-2])
    maps = [four_axes(side, batch) for side in (query, key, value, result)]
    unfolded = [side for side in maps if side is not None]
    if len(unfolded) < len(maps):
        watch.unreadable(site, FOLDED)
        return result
    q, k, v, z = unfolded
    dropped = given.get("dropout_p", 0.0) > 0
    gate = watch.gate(site, q.shape[1])
    if gate is not None:
        z = z * gate.to(z)
        result = z.reshape(result.shape)
    mask = given.get("attn_mask")
    if mask is not None:
        mask = mask_axes(mask, query, batch)
    number = watch.running.count_call(site)
    call = AttentionCall(
        site=site,
        call=number,
        repeats=watch.fused.repeats(query, key, site, number),
        seam="sdpa",
        streams=streams,
        query=q,
        key=k,
        value=v,
        mask=mask,
        is_causal=bool(given.get("is_causal", False)),
        scale=given.get("scale"),
        output=None if dropped or gate is not None else z,
        moved=next((m for side in (query, key, value) if (m := watch.traces.of(side).moved)), ""),
    )
    watch.await_projection(call, result, folded=query.dim() != 4)
    return result


def flex(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Any:  # noqa: ANN401
    """The flex kernel: its mask is a function of indices, so there is no map to look at."""
    result = func(*args, **kwargs)
    watch.traces.pass_on("flex_attention", args[:1], result)
    watch.unreadable(
        watch.running.site,
        "flex_attention keeps its scores to itself; use F.scaled_dot_product_attention instead",
    )
    return result


def multi_head_attention(watch: Watch, func: Any, args: Arguments, kwargs: Keywords) -> Any:  # noqa: ANN401
    """The function behind nn.MultiheadAttention, W_O included."""
    given = dict(zip(multihead.PARAMETERS, args, strict=False)) | kwargs
    site = watch.running.site
    gate = watch.gate(site, given["num_heads"])
    result = func(*args, **kwargs) if gate is None else func(**multihead.gated(given, gate))
    output: Tensor = result[0]
    streams = (watch.traces.of(given["query"]).stream, watch.traces.of(given["key"]).stream)
    watch.traces.set(output, Trace(stream=streams[0]))
    dropped = given.get("training", True) and given.get("dropout_p", 0.0) > 0
    with beside_the_model():
        projected = multihead.project(given)
    call = AttentionCall(
        site=site,
        call=watch.running.count_call(site),
        seam="multi_head_attention_forward",
        streams=streams,
        **projected,
        moved=next(
            (m for side in ("query", "key", "value") if (m := watch.traces.of(given[side]).moved)),
            "",
        ),
        output=None if dropped or gate is not None else multihead.batch_first(output),
        output_is_projected=True,
        output_projection=OutputProjection(
            site, given["out_proj_weight"].t(), given.get("out_proj_bias")
        ),
    )
    watch.await_projection(call)
    return result
