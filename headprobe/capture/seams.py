"""The functions at which attention is seen: sdpa, softmax, and nn.MultiheadAttention's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headprobe.capture import fused, written
from headprobe.capture.flow import name_of
from headprobe.capture.watch import Arguments, Keywords, Watch


class Seams(TorchFunctionMode):
    """Sees every torch function that the model calls and picks out the attention.

    Args:
        watch: what is known while the model runs.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._seams = dict(_SEAMS)
        flex = sys.modules.get("torch.nn.attention.flex_attention")
        if flex is not None:
            self._seams[flex.flex_attention_hop] = fused.flex

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if not self._watch.running:
            return func(*args, **kwargs)
        seam = self._seams.get(func)
        if seam is not None:
            return seam(self._watch, func, args, kwargs)
        result = func(*args, **kwargs)
        self._watch.traces.pass_on(name_of(func), (*args, *kwargs.values()), result)
        return result


Seam = Callable[[Watch, Any, Arguments, Keywords], Any]

# A function and what to do when the model calls it: another way to attend is another row.
_SEAMS: dict[Any, Seam] = {
    F.scaled_dot_product_attention: fused.sdpa,
    F.multi_head_attention_forward: fused.multi_head_attention,
    F.linear: written.linear,
    torch.addmm: written.addmm,
    **dict.fromkeys(
        (torch.softmax, torch.special.softmax, F.softmax, torch.Tensor.softmax), written.softmax
    ),
    **dict.fromkeys((torch.exp, torch.Tensor.exp, torch.Tensor.exp_), written.exponential),
    **dict.fromkeys((F.dropout, torch.dropout), written.dropout),
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
        written.product,
    ),
}
