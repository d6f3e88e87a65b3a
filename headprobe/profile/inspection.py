"""Are these whole maps of attention weights? Looked at before anything of them is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headprobe.capture import AttentionCall
from headprobe.errors import HeadprobeError
from headprobe.profile.audit import PADDING_MASS, row_sum_tolerance
from headprobe.profile.forms import GivenMap
from headprobe.profile.texts import Texts


def check_shapes(maps: Sequence[GivenMap]) -> None:
    """Every map must have the batch of the others and the lengths of its side.

    Raises:
        HeadprobeError: if one has not, with the likely reason.
    """
    batches = {given.site: given.weights.shape[0] for given in maps if given.weights is not None}
    if len(set(batches.values())) > 1:
        listed = ", ".join(f"{site!r} {batch}" for site, batch in batches.items())
        raise HeadprobeError(
            f"the maps have unlike numbers of sequences ({listed}): expected one batch of whole "
            "texts or pictures; maps of windows can't be given"
        )
    lengths: dict[str, tuple[str, list[int]]] = {}
    for given in maps:
        assert given.weights is not None
        axes = list(given.weights.shape[2:])
        if 0 in given.weights.shape:
            raise HeadprobeError(f"{given.site!r} is {list(given.weights.shape)}: it has no entry")
        if given.side != "cross" and axes[0] != axes[1]:
            raise HeadprobeError(
                f"{given.site!r} has {axes[0]} queries and {axes[1]} keys: expected the same "
                "number in self-attention (columns of a window or of pooled keys are no positions; "
                "maps from a cache lack rows; for cross-attention say kind='cross')"
            )
        first, expected = lengths.setdefault(given.side, (given.site, axes))
        if axes != expected:
            raise HeadprobeError(
                f"{given.site!r} is {axes}, {first!r} is {expected} [queries, keys]: expected maps "
                "of one batch and of one sequence"
            )


def check_content(call: AttentionCall, texts: Texts) -> AttentionCall:
    """The call, in the precision that its map really has, and with no rows of padding but zeros.

    Raises:
        HeadprobeError: if the rows of tokens are no distributions over tokens.
    """
    weights = call.weights
    assert weights is not None
    weights = weights.to(_precision(weights))
    queries, keys = valid(call, texts)
    if not bool(queries.all()):
        weights = weights.masked_fill(~queries[:, None, :, None], 0)
    if not bool(weights.isfinite().all()):
        raise HeadprobeError(
            f"{call.site!r} has weights that are not finite: a row whose keys are all masked (is "
            "it padding? then give attention_mask), or broken parameters"
        )
    sums = weights.sum(dim=-1, dtype=torch.float64).transpose(0, 1)[:, queries]
    reason = _reason(weights, float(sums.min()), float(sums.max()))
    if reason:
        raise HeadprobeError(f"{call.site!r} is no map of attention weights: {reason}")
    on_padding = float(weights.masked_fill(keys[:, None, None], 0).amax())
    if on_padding > PADDING_MASS:
        raise HeadprobeError(
            f"{call.site!r} attends to padding (weight {on_padding:.2g}): the mask is not the one "
            "that the model used, or the model doesn't use it"
        )
    return replace(call, weights=weights)


def valid(call: AttentionCall, texts: Texts) -> tuple[Tensor, Tensor]:
    """True for queries and for keys that are no padding, [batch, queries] and [batch, keys]."""
    sides = []
    for stream, length in zip(call.streams, (call.queries, call.keys), strict=True):
        mask = texts.mask(stream, length, call.device)
        if isinstance(mask, str):
            raise HeadprobeError(f"{call.site!r} can't be measured: {mask}")
        sides.append(mask)
    return sides[0], sides[1]


def _precision(weights: Tensor) -> torch.dtype:
    """The lowest precision that holds all weights: they may have been cast since."""
    for low in (torch.bfloat16, torch.float16):
        if weights.dtype == low or torch.equal(weights.to(low).to(weights.dtype), weights):
            return low
    return weights.dtype


def _reason(weights: Tensor, low: float, high: float) -> str:
    tolerance = row_sum_tolerance(weights.dtype)
    least, largest = float(weights.min()), float(weights.max())
    if least < -tolerance:
        return f"it has negative entries ({least:.2g}), so these are scores: apply softmax to them"
    if largest > 1 + tolerance or (low < 1 - tolerance and high > 1 + tolerance):
        return (
            f"its rows sum to {low:.2g} .. {high:.2g} with entries up to {largest:.2g}, so dropout "
            "acted on it: call model.eval() before the maps are made"
        )
    if high > 1 + tolerance:
        return f"its rows sum to up to {high:.2g}, so this is no softmax over keys"
    if low < 1 - tolerance:
        return (
            f"its rows sum to {low:.2g} .. {high:.2g}, so part of it is missing (a learned sink's "
            "column, keys that were cut off, a row that sees no key): run headprobe.profile on the "
            "model, which reads sinks"
        )
    return ""


def masks_read_off(
    calls: Sequence[AttentionCall], texts: Texts, kind: str | None, *, padding: bool
) -> list[Tensor | None]:
    """What each map's model may see, [1, 1, queries, keys]; None for everything.

    A key that has exactly no weight in any head was masked. Over all rows this tells how far back
    and ahead a layer sees: that may differ by layer, in a model with windows.

    Args:
        calls: the maps, rows of padding zero.
        texts: the batch.
        kind: `causal` or `bidirectional`, if it is known.
        padding: whether it was told what is padding.

    Raises:
        HeadprobeError: if the maps contradict `kind`, or seem to have padding that was not told.
    """
    used: dict[tuple[str | None, str | None], Tensor] = {}
    for call in calls:
        mine = _used(call)
        used[call.streams] = used[call.streams] | mine if call.streams in used else mine
    for call in calls:
        _check_columns(call, used[call.streams], texts, padding=padding)
    return [
        _mask(call, used[call.streams], texts, kind) if call.streams[0] == call.streams[1] else None
        for call in calls
    ]


def _used(call: AttentionCall) -> Tensor:
    """Whether any head attends from a query to a key, [batch, queries, keys]."""
    assert call.weights is not None
    return (call.weights != 0).any(dim=1)


def _check_columns(call: AttentionCall, used: Tensor, texts: Texts, *, padding: bool) -> None:
    _, keys = valid(call, texts)
    unseen = (keys & ~used.any(dim=1)).nonzero()
    if not padding and len(unseen):
        text, key = unseen[0].tolist()
        raise HeadprobeError(
            f"no head of any layer attends to key {key} of text {text}, as if it were padding: "
            "give attention_mask (all ones if it is a token)"
        )


def _mask(call: AttentionCall, used: Tensor, texts: Texts, kind: str | None) -> Tensor | None:
    """Causal order and the window of one layer of a stack."""
    n = call.queries
    positions = torch.arange(n, device=call.device)
    ahead = positions - positions[:, None]  # of the query, in keys
    sees_later = _sees_later(call, used, ahead > 0, texts, kind)
    seen = ahead[_used(call).any(dim=0)]
    farthest = int(seen.max()) if sees_later else 0
    if sees_later and not bool((used & (ahead > 0)).any()):
        farthest = n - 1  # the caller knows better than zeros that all heads happen to share
    mask = (ahead <= farthest) & (ahead >= int(seen.min()))
    return None if bool(mask.all()) else mask[None, None]


def _sees_later(
    call: AttentionCall, used: Tensor, later: Tensor, texts: Texts, kind: str | None
) -> bool:
    """Whether the stack is bidirectional."""
    queries, keys = valid(call, texts)
    might = (later & keys[:, None]).any(dim=2) & queries  # rows that have a later key
    does = (used & later).any(dim=2)
    if kind == "causal" and bool(does.any()):
        raise HeadprobeError(
            f"kind is 'causal', but the maps of {call.site!r} and its like attend to keys after "
            "the query: leave it out, or give attention_mask if those rows are padding"
        )
    if kind is None and bool(does.any()) and not torch.equal(does, might):
        raise HeadprobeError(
            "some rows attend to later keys and others to none in any layer, as padding on the "
            "left of a causal model does: give attention_mask, or, if it is none, "
            "kind='bidirectional'"
        )
    return kind == "bidirectional" or bool(does.any())
