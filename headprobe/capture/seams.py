"""The functions at which attention is seen: sdpa, softmax, and nn.MultiheadAttention's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headprobe.capture import multihead
from headprobe.capture.call import AttentionCall, OutputProjection, visible_keys
from headprobe.capture.flow import (
    Consumers,
    Softmaxed,
    Trace,
    Traces,
    name_of,
    tensors_in,
)
from headprobe.capture.running import RunningModules

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass
class Pending:
    """A call that waits for its W_O: the linear maps between it and the next attention call."""

    call: AttentionCall
    consumers: Consumers


class Seams(TorchFunctionMode):
    """Sees every torch function that the model calls and picks out the attention.

    Args:
        running: tells which module is running.
        deliver: takes each call, with the linear maps that its output went to.
        gate: what to multiply a call's heads by, given its site and number of heads; None for 1.
    """

    def __init__(
        self,
        running: RunningModules,
        deliver: Callable[[Pending], None],
        gate: Callable[[str, int], Tensor | None],
    ) -> None:
        super().__init__()
        self.traces = Traces()
        self.unread: dict[str, str] = {}
        self.batch: int | None = None
        self._running = running
        self._deliver = deliver
        self._gate = gate
        self._pending: Pending | None = None
        self._softmaxes: list[Softmaxed] = []
        self._busy = False

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if self._busy or not self._running:
            return func(*args, **kwargs)
        seam = _SEAMS.get(func)
        if seam is not None:
            return seam(self, func, args, kwargs)
        result = func(*args, **kwargs)
        self.traces.pass_on(name_of(func), (*args, *kwargs.values()), result)
        return result

    def flush(self) -> None:
        """Hand over the call that waits for its W_O."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._busy = True
            try:
                self._deliver(pending)
            finally:
                self._busy = False
                pending.consumers.close()

    def finish_pass(self) -> None:
        """The outermost module has returned: nothing more will happen to what it left."""
        self.flush()
        for softmax in self._softmaxes:
            if not softmax.used:
                self.unread[softmax.site] = softmax.fate
        self._softmaxes.clear()

    def discard(self) -> None:
        """Forget everything; a failed run leaves nothing behind."""
        self._pending = None
        self.traces.clear()

    # Each seam runs the model's own function with its own arguments and returns its own result.

    def _sdpa(self, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
        result: Tensor = func(*args, **kwargs)
        given = dict(zip(_SDPA_PARAMETERS, args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        streams = (self.traces.of(query).stream, self.traces.of(key).stream)
        site = self._running.site
        maps = [self._four_axes(side) for side in (query, key, value, result)]
        unfolded = [side for side in maps if side is not None]
        if len(unfolded) < len(maps) or query.is_nested:
            self._unreadable(site, "batch and heads can't be told apart")
            return result
        q, k, v, z = unfolded
        dropped = given.get("dropout_p", 0.0) > 0
        gate = self._gate(site, q.shape[1])
        if gate is not None:
            z = z * gate
            result = z.reshape(result.shape)
        mask = given.get("attn_mask")
        if mask is not None and query.dim() == 3 and mask.dim() == 3 and len(mask) == len(query):
            mask = self._four_axes(mask)
        call = AttentionCall(
            site=site,
            call=self._running.count_call(site),
            seam="sdpa",
            streams=streams,
            query=q,
            key=k,
            value=v,
            mask=mask,
            is_causal=bool(given.get("is_causal", False)),
            scale=given.get("scale"),
            output=None if dropped or gate is not None else z,
        )
        self._await_projection(call, result)
        return result

    def _softmax(self, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
        result: Tensor = func(*args, **kwargs)
        scores: Tensor = args[0] if args else kwargs["input"]
        trace = self.traces.of(scores)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if trace.product is None or not isinstance(dim, int):
            self.traces.pass_on("softmax", (scores,), result)
            return result
        seen = Softmaxed(self._running.site, scores.shape[-2] if scores.dim() > 1 else 1)
        if dim % scores.dim() != scores.dim() - 1:
            seen.fate = f"the softmax runs over axis {dim}, not over the last"
        else:
            self.traces.set(
                result,
                Trace(stream=trace.stream, product=trace.product, softmaxed=seen, scores=scores),
            )
        self._softmaxes.append(seen)
        return result

    def _dropout(self, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        before: Tensor = given["input"]
        trace = self.traces.of(before)
        acts = given.get("training", True) and given.get("p", 0.5) > 0
        undropped = before
        if acts and trace.softmaxed and given.get("inplace"):
            undropped = before.clone()
        result: Tensor = func(*args, **kwargs)
        if not acts:
            self.traces.pass_on("clone", (before,), result)
        elif trace.softmaxed:
            self.traces.set(
                result,
                Trace(trace.stream, trace.product, trace.softmaxed, trace.scores, undropped),
            )
        else:
            self.traces.pass_on("dropout", (before,), result)
        return result

    def _product(self, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
        """A matmul, bmm, baddbmm or einsum: scores, values weighted, or a linear map."""
        result: Tensor = func(*args, **kwargs)
        factors = list(tensors_in((*args, *kwargs.values())))[-2:]  # baddbmm adds the one before
        if len(factors) < 2:
            self.traces.pass_on(name_of(func), factors, result)
            return result
        first, second = factors
        if name_of(func) == "__rmatmul__":
            first, second = second, first
        left, right = self.traces.of(first), self.traces.of(second)
        if left.softmaxed:
            return self._weighted(first, second, result)
        if right.softmaxed:
            right.softmaxed.fate = "the weights are the second factor of the product"
        elif _is_weight(second):
            self._linear_map(first, second, None, result)
            return result
        product = (left.stream, right.stream)
        self.traces.set(result, Trace(stream=left.stream or right.stream, product=product))
        return result

    def _linear(self, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
        result: Tensor = func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        self._linear_map(given["input"], given["weight"].t(), given.get("bias"), result)
        return result

    def _addmm(self, func: Any, args: Arguments, kwargs: Keywords) -> Tensor:  # noqa: ANN401
        result: Tensor = func(*args, **kwargs)
        given = dict(zip(("input", "mat1", "mat2"), args, strict=False)) | kwargs
        self._linear_map(given["mat1"], given["mat2"], given["input"], result)
        return result

    def _mha(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:  # noqa: ANN401
        given = dict(zip(multihead.PARAMETERS, args, strict=False)) | kwargs
        site = self._running.site
        gate = self._gate(site, given["num_heads"])
        result = func(*args, **kwargs) if gate is None else func(**multihead.gated(given, gate))
        output: Tensor = result[0]
        streams = (self.traces.of(given["query"]).stream, self.traces.of(given["key"]).stream)
        self.traces.set(output, Trace(stream=streams[0]))
        extra = [n for n in ("bias_k", "static_k", "static_v") if given.get(n) is not None]
        if extra or given.get("add_zero_attn"):
            reason = f"there are keys that are no token ({', '.join(extra) or 'add_zero_attn'})"
            self._unreadable(site, reason)
            return result
        dropped = given.get("training", True) and given.get("dropout_p", 0.0) > 0
        call = AttentionCall(
            site=site,
            call=self._running.count_call(site),
            seam="multi_head_attention_forward",
            streams=streams,
            **multihead.project(given),
            output=None if dropped or gate is not None else multihead.batch_first(output),
            output_is_projected=True,
            output_projection=OutputProjection(
                site, given["out_proj_weight"].t(), given.get("out_proj_bias")
            ),
        )
        self.flush()
        self._pending = Pending(call, Consumers())
        return result

    def _weighted(self, consumed: Tensor, values: Tensor, result: Tensor) -> Tensor:
        """The weights meet the values: this is an attention call."""
        trace = self.traces.of(consumed)
        assert trace.softmaxed is not None
        assert trace.product is not None
        weights = consumed if trace.undropped is None else trace.undropped
        w, v, z = (self._four_axes(side) for side in (weights, values, result))
        if w is not None and z is not None and w.shape[2] != trace.softmaxed.queries:
            # Heads that share keys and values were stacked: [batch, kv_heads, group * queries, ..]
            w, z = (
                side.unflatten(2, (-1, trace.softmaxed.queries)).flatten(1, 2) for side in (w, z)
            )
        site = self._running.site
        if w is None or v is None or z is None or w.shape[-1] != v.shape[2]:
            trace.softmaxed.fate = (
                f"weights {list(consumed.shape)} and values {list(values.shape)} are not laid out "
                "[batch, heads, queries, keys]"
            )
            return result
        trace.softmaxed.used = True
        gate = self._gate(site, w.shape[1])
        if gate is not None:
            z = z * gate
            result = z.reshape(result.shape)
        call = AttentionCall(
            site=site,
            call=self._running.count_call(site),
            seam="softmax",
            streams=trace.product,
            weights=w,
            value=v,
            mask=_visible(trace.scores, w),
            output=z if trace.undropped is None and gate is None else None,
        )
        self._await_projection(call, result)
        return result

    def _linear_map(self, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        trace = self.traces.of(x)
        if trace.consumers is not None and not trace.consumers.closed:
            if trace.obstacle is not None:
                trace.consumers.obstacles.append(trace.obstacle)
            trace.consumers.maps.append((self._running.site, weight, bias, x))
        if trace.stream is not None:
            self.traces.set(result, Trace(stream=trace.stream))

    def _await_projection(self, call: AttentionCall, result: Tensor) -> None:
        self.flush()
        consumers = Consumers()
        self._pending = Pending(call, consumers)
        self.traces.set(result, Trace(stream=call.streams[0], consumers=consumers))

    def _four_axes(self, tensor: Tensor) -> Tensor | None:
        """[batch, heads, length, dim] from [batch * heads, length, dim] and the like."""
        if tensor.dim() == 4:
            return tensor
        if tensor.dim() > 4:
            return tensor.flatten(1, -3)
        if tensor.dim() == 3 and self.batch and tensor.shape[0] % self.batch == 0:
            unfolded: Tensor = tensor.unflatten(0, (self.batch, -1))
            return unfolded
        return None

    def _unreadable(self, site: str, reason: str) -> None:
        self.unread[site] = reason


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dim() <= 2 or isinstance(tensor, torch.nn.Parameter)


def _visible(scores: Tensor | None, weights: Tensor) -> Tensor:
    """What the mask left visible, read off the scores; kept for one head where heads agree."""
    if scores is None or scores.shape[-2] != weights.shape[-2]:
        return weights > 0
    visible = visible_keys(scores)[..., : weights.shape[-1]]
    visible = visible.reshape(weights.shape)
    if bool((visible == visible[:, :1]).all()):
        return visible[:, :1].clone()
    return visible


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

Seam = Callable[[Seams, Any, Arguments, Keywords], Any]

# A function and what to do when the model calls it: another way to attend is another row.
_SEAMS: dict[Any, Seam] = {
    F.scaled_dot_product_attention: Seams._sdpa,
    F.multi_head_attention_forward: Seams._mha,
    F.linear: Seams._linear,
    torch.addmm: Seams._addmm,
    **dict.fromkeys(
        (torch.softmax, torch.special.softmax, F.softmax, torch.Tensor.softmax), Seams._softmax
    ),
    **dict.fromkeys((F.dropout, torch.dropout), Seams._dropout),
    **dict.fromkeys(
        (
            torch.matmul,
            torch.Tensor.matmul,
            torch.Tensor.__matmul__,
            torch.Tensor.__rmatmul__,
            torch.bmm,
            torch.Tensor.bmm,
            torch.baddbmm,
            torch.Tensor.baddbmm,
            torch.einsum,
        ),
        Seams._product,
    ),
}
