"""What is known while a model runs: its tensors' traces, and the call that waits for its W_O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headprobe.capture.call import AttentionCall
from headprobe.capture.flow import Consumers, Softmaxed, Trace, Traces
from headprobe.capture.following import Following
from headprobe.capture.places import places_of
from headprobe.capture.projection import Pending
from headprobe.capture.running import RunningModules

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

NO_SOFTMAX = "its scores meet the values without a softmax (linear attention, a sigmoid)"
"""Why a module that attends has no attention weights."""

PAD_THEM = "give padded ones (torch.nested.to_padded_tensor) and a mask"

FOLDED = "batch, heads and windows can't be told apart"


@contextmanager
def beside_the_model() -> Iterator[None]:
    """What is computed here is not the model's own.

    A layer that is checkpointed runs again on the way back, where this is not computed: the tensors
    that it saves must not be among those that checkpointing counts.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message():  # inside torch.func
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class FusedMaps:
    """Tells whether a fused kernel makes the map of the call before once more."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, str, int] | None = None

    def repeats(self, query: Tensor, key: Tensor, site: str, number: int) -> int | None:
        """The earlier call of the module with the same entries, or None; remembers this one."""
        if self._last is not None and self._last[2] == site:
            last_query, last_key, _, first = self._last
            if torch.equal(last_query, query) and torch.equal(last_key, key):
                return first
        self._last = query.detach(), key.detach(), site, number
        return None

    def clear(self) -> None:
        """Hold no tensor any more."""
        self._last = None


class Watch:
    """The state that the seams share.

    Args:
        running: tells which module is running.
        deliver: takes each call, with the linear maps that its output went to.
        gate: what to multiply a call's heads by, given its site and number of heads; None for 1.

    Attributes:
        traces: what is known of each tensor.
        following: where in the input each tensor's entries lie.
        axes: model input -> its first two axes, of which one tells the number of sequences.
        unread: site -> reason, for modules that seemed to attend but could not be read.
        softmaxes: those of this pass that may be attention.
        fused: the map that the last fused kernel made inside.
    """

    def __init__(
        self,
        running: RunningModules,
        deliver: Callable[[Pending], None],
        gate: Callable[[str, int], Tensor | None],
    ) -> None:
        self.running = running
        self.gate = gate
        self.traces = Traces()
        self.following = Following()
        self.axes: dict[str, tuple[int, ...]] = {}
        self.unread: dict[str, str] = {}
        self.softmaxes: list[Softmaxed] = []
        self.fused = FusedMaps()
        self._deliver = deliver
        self._pending: Pending | None = None

    def sequences(self, stream: str | None, length: int) -> int | None:
        """Number of sequences that the model was given; None if that is unknown.

        Args:
            stream: the model input that a map's queries come from.
            length: how many queries it has: an axis of that size is not the batch.
        """
        axes = self.axes.get(stream or "") or next(iter(self.axes.values()), ())
        batch_last = len(axes) > 1 and axes[0] == length != axes[1]
        return axes[1] if batch_last else next(iter(axes), None)

    def is_sequence(self, stream: str | None, scores: Tensor) -> bool:
        """Whether the last axis of something like scores is as long as an input's sequence."""
        return scores.dim() > 2 and scores.shape[-1] in self.axes.get(stream or "", ())

    def _flush(self) -> None:
        """Hand over the call that waits for its W_O."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            with beside_the_model():
                pending.unpack()
                pending.regroup()
                if pending.misread:
                    self.unreadable(pending.call.site, FOLDED)
                    return
                # What the observer computes is nobody's attention, not for a Capture around this.
                with torch._C.DisableTorchFunction():
                    self._deliver(pending)
        finally:
            pending.consumers.close()

    def finish_pass(self) -> None:
        """The outermost module has returned: nothing more will happen to what it left."""
        self.fused.clear()
        self._flush()
        for softmax in self.softmaxes:
            if not softmax.used:
                self.unread[softmax.site] = softmax.fate
        self.softmaxes.clear()

    def discard(self) -> None:
        """Forget everything; a failed run leaves nothing behind."""
        self._pending = None
        self.fused.clear()
        self.softmaxes.clear()
        self.traces.clear()
        self.following.clear()

    def await_projection(
        self, call: AttentionCall, result: Tensor | None = None, *, folded: bool = False
    ) -> None:
        """Hold a call until the next one comes or the model returns.

        Args:
            call: the attention call.
            result: its output, to be followed; None if W_O is known.
            folded: whether they came with other axes than [batch, heads, length, dim].
        """
        self._flush()
        consumers = Consumers()
        placed = replace(call, places=places_of(call, self.following))
        self._pending = Pending(placed, consumers, folded)
        if result is not None:
            self.traces.set(result, Trace(stream=call.streams[0], consumers=consumers))

    def linear_map(self, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        """A linear map took x; if x is an attention output, this may be W_O."""
        trace = self.traces.of(x)
        if trace.consumers is not None and not trace.consumers.closed:
            if trace.obstacle is not None:
                trace.consumers.obstacles.append(trace.obstacle)
            trace.consumers.maps.append((self.running.site, weight, bias, x))
        if trace.stream is not None:
            self.traces.set(result, Trace(stream=trace.stream))

    def unreadable(self, site: str, reason: str) -> None:
        """A module seems to attend but can't be read."""
        self.unread[site] = reason
