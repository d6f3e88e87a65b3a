"""See, and gate, every attention call of a running model, whatever the model.

Three functions are watched while the model runs (`F.scaled_dot_product_attention`, softmax, and
`F.multi_head_attention_forward`), so the model's own code, kernels and masks stay in use and no
model has to be known by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from headprobe.capture.call import AttentionCall, Block, OutputProjection, visible_keys
from headprobe.capture.flow import LEARNED, Trace
from headprobe.capture.kernels import seen_kernels
from headprobe.capture.places import Places
from headprobe.capture.projection import Pending, output_projection
from headprobe.capture.running import RunningModules
from headprobe.capture.seams import Seams
from headprobe.capture.watch import NO_SOFTMAX, PAD_THEM, Watch
from headprobe.errors import HeadprobeError, NoAttentionError

__all__ = [
    "LEARNED",
    "NO_SOFTMAX",
    "AttentionCall",
    "Block",
    "Capture",
    "OutputProjection",
    "Places",
    "distinct",
    "is_content",
    "seen_kernels",
    "visible_keys",
]

# Without one of these nothing is compiled, and the compiler loads slowly.
_COMPILING = ("torch._dynamo", "torch.nn.attention.flex_attention")

# Inputs whose positions are not a sequence of their own.
_NOT_CONTENT = ("mask", "position", "token_type", "segment", "label", "cache", "past")


class Capture:
    """A context manager that sees every attention call of a model.

    The model computes what it computes anyway; its output, hooks, config and training flag stay as
    they are, also after an exception. Weights are those before dropout. A transformers model whose
    attention runs in a closed kernel (flash, flex) uses sdpa inside the context, and a compiled
    model runs uncompiled.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
        >>> with Capture(layer, lambda call: print(call.site, call.heads, call.queries)):
        ...     _ = layer(torch.zeros(1, 5, 8))
        self_attn 2 5

    Args:
        model: any module; it may be run whole or in parts inside the context.
        observe: called with each `AttentionCall`, once its W_O is known: when the next attention
            call comes, or the model returns. What it keeps of a call stays in memory.
        gates: factors on the heads' outputs before W_O, by site: [heads], or [batch, heads] for
            one gate per sequence. They may require gradients.

    Attributes:
        calls: how many attention calls were seen.
        unread: site -> reason, for modules that seemed to attend but could not be read.

    Raises:
        NoAttentionError: on leaving the context, if the model ran and no attention was seen.
        HeadprobeError: on leaving the context, if a gate was never applied.
        ValueError: if a gate has not one entry per head, or one that is no number.
        TypeError: if the model is no module, a gate no tensor, or `observe` can't be called.
    """

    def __init__(
        self,
        model: nn.Module,
        observe: Callable[[AttentionCall], object] | None = None,
        *,
        gates: Mapping[str, Tensor] | None = None,
    ) -> None:
        _check_arguments(model, observe, gates or {})
        self.model = model
        self.calls = 0
        self._observe = observe
        self._gates = dict(gates or {})
        self._gated: set[str] = set()
        self._running = RunningModules(model, self._finish_pass)
        self._watch = Watch(self._running, self._deliver, self._gate)
        self._stack = ExitStack()

    @property
    def unread(self) -> dict[str, str]:
        """Modules that seemed to attend but could not be read, and why."""
        return dict(self._watch.unread)

    def mark(self, inputs: Mapping[str, object]) -> None:
        """Name the tensors that the model is about to read, each a sequence of its own.

        Done by itself when the whole model is called; needed only when a part of it is.
        """
        contents = [
            (name, tensor)
            for name, tensor in inputs.items()
            if isinstance(tensor, Tensor) and is_content(name)
        ]
        for name, tensor in reversed(contents):  # the first name of a tensor given twice stays
            self._watch.traces.set(tensor, Trace(stream=name))
        self._watch.following.start(dict(contents))
        self._watch.axes = {
            name: tuple(tensor.shape[:2]) for name, tensor in contents if not tensor.is_nested
        }

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # if one of these fails, those before it are undone
            stack.callback(self._watch.discard)
            self._running.install(stack)
            hook = self.model.register_forward_pre_hook(self._mark_arguments, with_kwargs=True)
            stack.callback(hook.remove)
            stack.enter_context(seen_kernels(self.model))
            if any(name in sys.modules for name in _COMPILING):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._watch.following)  # also sees what the seams do
            stack.enter_context(Seams(self._watch))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if kind is not None or not self._running.ran:
            return
        if self.calls == 0:
            raise NoAttentionError(self._why_nothing_was_seen())
        unused = sorted(set(self._gates) - self._gated)
        if unused:
            raise HeadprobeError(
                f"the gates for {', '.join(map(repr, unused))} were never applied: no attention "
                "call was seen there; name the modules as Capture names them (AttentionCall.site)"
            )

    def _mark_arguments(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = distinct(kwargs)
        nested = any(
            isinstance(value, Tensor) and value.is_nested for value in (*args, *kwargs.values())
        )
        if nested and any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
            raise HeadprobeError(
                "nn.MultiheadAttention takes nested tensors only in its fused path, which can't be "
                f"seen: {PAD_THEM}"
            )
        try:
            bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        except (TypeError, ValueError):  # a wrong call is the model's to report
            return args, kwargs
        self.mark({**bound, **kwargs})
        return args, kwargs

    def _finish_pass(self, returned: bool) -> None:
        if returned:
            self._watch.finish_pass()
        else:
            self._watch.discard()

    def _gate(self, site: str, heads: int) -> Tensor | None:
        gate = self._gates.get(site)
        if gate is None:
            return None
        if gate.shape[-1] != heads:
            raise ValueError(
                f"gates[{site!r}] has {gate.shape[-1]} entries, that layer has {heads} heads"
            )
        self._gated.add(site)
        return gate.reshape(-1, heads, 1, 1)

    def _deliver(self, pending: Pending) -> None:
        self.calls += 1
        if self._observe is None:
            return
        call = pending.call
        if call.output_projection is None:
            projection, reason = output_projection(call, pending.consumers)
            call = replace(call, output_projection=projection, no_projection=reason)
        self._observe(call)

    def _why_nothing_was_seen(self) -> str:
        for site, reason in self.unread.items():
            if reason != NO_SOFTMAX:
                return f"no attention map could be read: in {site!r}, {reason}"
        none = "the model ran, but no softmax attention was seen: "
        for site, reason in self.unread.items():
            return f"{none}in {site!r}, {reason}"
        return none + (
            "it may have none (state-space and linear-attention models), or compute it where torch "
            "can't be watched (TorchScript, a custom kernel, another thread); run the plain "
            "PyTorch module in this thread"
        )


def _check_arguments(model: object, observe: object, gates: Mapping[str, object]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: expected a torch nn.Module")
    if observe is not None and not callable(observe):
        raise TypeError(f"observe is a {type(observe).__name__}: expected a function of a call")
    for site, gate in gates.items():
        if not isinstance(gate, Tensor):
            raise TypeError(f"gates[{site!r}] is a {type(gate).__name__}: expected a tensor")
        if gate.dim() not in (1, 2) or not bool(gate.isfinite().all()):
            raise ValueError(
                f"gates[{site!r}] is {list(gate.shape)}: expected finite numbers, [heads] or "
                "[batch, heads]"
            )


def is_content(name: str) -> bool:
    """Whether a model input of this name is a sequence, not something told about one."""
    return not any(word in name for word in _NOT_CONTENT)


def distinct(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs, with a view in place of token ids that are given under a second name.

    An encoder and a decoder may read the same ids; they are two sequences all the same.
    """
    met: set[int] = set()
    result = dict(inputs)
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.is_floating_point():
            continue
        if id(value) in met:
            result[name] = value.view_as(value)
        met.add(id(value))
    return result
