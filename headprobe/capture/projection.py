"""W_O, found by where the attention output goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headprobe.capture.call import AttentionCall, OutputProjection
from headprobe.capture.flow import Consumers
from headprobe.capture.places import Places


@dataclass
class Pending:
    """A call that waits for its W_O: the linear maps between it and the next attention call.

    Attributes:
        call: the attention call.
        consumers: where its output went.
        folded: whether batch and heads came as other axes than two: then their sizes are a guess.
    """

    call: AttentionCall
    consumers: Consumers
    folded: bool = False

    @property
    def misread(self) -> bool:
        """Whether the linear map that took the output shows that the guess was wrong."""
        if not self.folded or self.consumers.obstacles:
            return False
        return any(taken.shape[-1] != self.call.width for *_, taken in self.consumers.maps)

    def unpack(self) -> None:
        """Where the heads of a group came as the rows of one, give each its place.

        A model may do that for a single query position, so that keys need not be repeated. W_O
        tells: it takes the rows side by side.
        """
        call = self.call
        taken = [x for *_, x in self.consumers.maps if not self.consumers.obstacles]
        if call.query is None or call.queries == 1 or not taken:
            return
        width = call.width * call.queries
        if any(x.shape[-1] != width or x.numel() != call.batch * width for x in taken):
            return

        output = call.output
        self.call = replace(
            call,
            query=_per_row(call.query, call.heads),
            mask=None if call.mask is None else _per_row(call.mask, call.heads),
            output=None if output is None else _per_row(output, call.heads),
        )

    def regroup(self) -> None:
        """Where windows came as heads, make each a sequence of its own.

        Of five axes it can't be told which is what; W_O tells how many heads lie side by side.
        """
        call = self.call
        widths = {x.shape[-1] for *_, x in self.consumers.maps if not self.consumers.obstacles}
        if not self.folded or call.value is None or len(widths) != 1:
            return
        heads, rest = divmod(widths.pop(), call.value.shape[-1])
        if rest or not heads or heads >= call.heads or call.heads % heads:
            return
        windows = call.heads // heads

        def regrouped(side: Tensor | None) -> Tensor | None:
            if side is None or side.dim() < 4:
                return side
            whole = side.expand(call.batch, -1, -1, -1)
            if side.shape[1] % windows:
                return whole.repeat_interleave(windows, dim=0)
            alone: Tensor = whole.unflatten(1, (windows, -1)).flatten(0, 1)
            return alone

        names = ("query", "key", "value", "mask", "weights", "output")
        sides: dict[str, Any] = {name: regrouped(getattr(call, name)) for name in names}
        places = Places("", "its sequences are windows, which could not be followed")
        self.call = replace(call, places=places, **sides)


def _per_row(side: Tensor, heads: int) -> Tensor:
    """[batch, heads * rows, 1, ...] from [batch, heads, rows, ...]; the same for all rows stays."""
    if side.dim() < 4 or side.shape[2] == 1:
        return side
    return side.expand(-1, heads, -1, -1).flatten(1, 2)[:, :, None]


_WRAPPED = "base_layer"
"""What peft calls the module that an adapter's wrapper runs. What the wrapper adds before or after
it need not be a linear map, so that the module alone may look like all of W_O."""


def output_projection(
    call: AttentionCall, consumers: Consumers
) -> tuple[OutputProjection | None, str]:
    """W_O of a call, if exactly one linear map took its output and nothing lay between.

    Args:
        call: the attention call.
        consumers: where its output went.

    Returns:
        W_O or None, and why it is None.
    """
    if any(site.split(".")[-1] == _WRAPPED for site, *_ in consumers.maps):
        return None, "its linear map carries an adapter: merge that first (merge_and_unload)"
    if consumers.obstacles:
        return None, f"{consumers.obstacles[0]!r} lies between the attention and the linear map"
    if not consumers.maps:
        return None, "no linear map took the attention output"
    if len(consumers.maps) > 1:
        sites = ", ".join(site for site, *_ in consumers.maps)
        return None, f"more than one linear map took the attention output ({sites})"
    site, weight, bias, taken = consumers.maps[0]
    if not _heads_side_by_side(call, taken):
        return None, f"the input of {site!r} is not the heads' outputs side by side"
    return OutputProjection(site, weight, bias), ""


@torch.no_grad()
def _heads_side_by_side(call: AttentionCall, taken: Tensor) -> bool:
    """Whether W_O's input is z with the heads on the feature axis, looked at in one position."""
    if call.output is None:
        return taken.shape[-1] == call.width
    z = call.output
    if taken.numel() != z.numel() or taken.shape[-1] != z.shape[1] * z.shape[3]:
        return False
    first = z[:, :, 0].to(taken.dtype)
    batch_first = taken.reshape(call.batch, call.queries, call.heads, -1)[:, 0]
    batch_second = taken.reshape(call.queries, call.batch, call.heads, -1)[0]
    return any(
        torch.allclose(one, first, rtol=0.0, atol=0.0, equal_nan=True)
        for one in (batch_first, batch_second)
    )
