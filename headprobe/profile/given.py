"""Measure maps that somebody already has: `from_attentions(maps) -> Profile`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from headprobe.capture import AttentionCall, Places, is_content
from headprobe.errors import HeadprobeError
from headprobe.profile.forms import GivenMap, Side, read_maps
from headprobe.profile.inspection import check_content, check_shapes, masks_read_off
from headprobe.profile.observer import Observer
from headprobe.profile.run import Sampling, checked_classes
from headprobe.profile.sums import Profile
from headprobe.profile.texts import Texts, mask_of, read_batch

Kind = Literal["bidirectional", "causal", "cross"]


def from_attentions(
    attentions: Any,  # noqa: ANN401 - people keep their maps in many forms
    *,
    kind: Kind | None = None,
    sampling: Sampling | None = None,
    token_classes: Mapping[str, Iterable[int]] | None = None,
    **inputs: Any,  # noqa: ANN401
) -> Profile:
    """Measure attention maps that somebody already has, without the model.

    The figures are those of `profile(model, batches)` on the same batch; what needs the values or
    W_O (`output_norm`, `kv_group`) stays empty. Profiles of more batches are added with `+`.

    Of the model's mask, causal order and windows are read off the exact zeros that all heads share,
    and padding is taken from the inputs; keys that another mask hides count as visible.

    Args:
        attentions: weights after softmax, without dropout, as one of:
            a tensor or array [batch, heads, queries, keys] per layer (`outputs.attentions`), or
            [heads, queries, keys] of one text;
            one array [layers, batch, heads, queries, keys], or [layers, heads, queries, keys];
            a mapping with `attentions`, or `encoder_attentions`, `decoder_attentions` and
            `cross_attentions` (the model's output), or with keys like
            `blocks.0.attn.hook_pattern` (a cache of hooks);
            what `generate` gives, a tuple of layers per step: put together to whole maps.
            None in place of a layer leaves it out. Maps averaged over heads are one head:
            give [batch, 1, queries, keys].
        kind: of the maps, where they are of one stack: `causal`, `bidirectional`, or `cross`; None
            to read it off the maps.
        sampling: on which rows heads are compared.
        token_classes: token class (one of TOKEN_CLASSES) -> token ids, for the mass on them.
        inputs: what the model read, by the names of its forward, [batch, positions, ...]:
            `input_ids` (with it, the sampled rows are those that `profile` draws) and its
            `attention_mask` (1 is a token, 0 is padding; without it nothing is padding),
            `decoder_input_ids` and `decoder_attention_mask`, `pixel_values` ... Where the patches
            of images or the frames of sounds lie can't be told without the model: no distances.

    Returns:
        The sums, as from `profile`.

    Raises:
        HeadprobeError: if these are no whole maps of attention weights, with the likely reason.
        TypeError: if the maps or an input are of no type that holds numbers.
        ValueError: if an input has other axes than the maps, or an option is unknown.

    Example:
        >>> maps = [torch.rand(2, 4, 5, 5).softmax(dim=-1) for _ in range(3)]
        >>> len(from_attentions(maps, attention_mask=torch.ones(2, 5)).heads())
        12
    """
    sampling = sampling or Sampling()
    classes = checked_classes(token_classes)
    maps = _of_kind(read_maps(attentions), kind)
    present = [given for given in maps if given.weights is not None]
    if not present:
        raise HeadprobeError(
            "all maps are None (sdpa makes none): load the model with attn_implementation='eager' "
            "and call it with output_attentions=True, or run headprobe.profile on the model"
        )
    device = _weights(present[0]).device
    present = [replace(given, weights=_weights(given).to(device)) for given in present]
    check_shapes(present)
    tensors = _inputs(inputs, device)
    streams = _streams({given.side for given in present}, tensors)
    texts = _texts(present, streams, tensors, sampling.seed, classes)
    calls = [_call(given, streams[given.side], tensors) for given in present]
    calls = [check_content(call, texts) for call in calls]
    masks = masks_read_off(calls, texts, None if kind == "cross" else kind, padding=_told(tensors))
    observer = Observer(texts, sampling)
    for call, mask in zip(calls, masks, strict=True):
        observer(replace(call, mask=mask))
    missing = {given.site: "no map was given (None)" for given in maps if given.weights is None}
    heads = ", ".join(str(call.heads) for call in calls)
    settings = {"model": f"given maps of {heads} heads", **sampling.__dict__}
    return _whole(observer.finish({}, settings | {"classes": sorted(classes)}), missing)


def _whole(profile: Profile, missing: dict[str, str]) -> Profile:
    """The profile, or an error if a map that was given is not in it."""
    for site, reason in profile.left_out.items():
        raise HeadprobeError(f"{site!r} can't be measured: {reason}")
    return replace(profile, left_out=missing)


def _of_kind(maps: list[GivenMap], kind: str | None) -> list[GivenMap]:
    if kind is None:
        return maps
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}: expected {', '.join(map(repr, get_args(Kind)))}")
    if len({given.side for given in maps}) > 1:
        raise ValueError(f"kind is {kind!r}, but the maps are of several stacks: leave it out")
    return [replace(given, side="cross") for given in maps] if kind == "cross" else maps


def _weights(given: GivenMap) -> Tensor:
    assert given.weights is not None  # those without were left out before
    return given.weights


def _inputs(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The inputs as tensors; None is as good as not given."""
    tensors = {}
    for name, value in inputs.items():
        if value is None:
            continue
        try:
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        except (
            TypeError,
            ValueError,
        ) as error:  # words, rows of unlike lengths, an option misspelt
            raise TypeError(
                f"{name!r} is a {type(value).__name__}: expected a tensor or an array of numbers "
                "that the model reads, such as input_ids or attention_mask, [batch, positions]"
            ) from error
        if tensor.dim() < 2 and (is_content(name) or name.endswith("attention_mask")):
            raise ValueError(f"{name} is {list(tensor.shape)}: expected [batch, positions]")
        tensors[name] = tensor.to(device)
    return tensors


def _told(inputs: Mapping[str, Tensor]) -> bool:
    """Whether anything was said of padding."""
    return any("mask" in name for name in inputs)


def _streams(
    sides: set[Side], inputs: Mapping[str, Tensor]
) -> dict[Side, tuple[str | None, str | None]]:
    """The inputs that queries and keys of each side come from; a name for those not given."""
    contents = [name for name in inputs if is_content(name)]

    def first(side: str) -> str:
        return next((name for name in contents if name.startswith(side)), f"{side}attentions")

    decoder, encoder = first("decoder_"), first("encoder_")
    others = [name for name in contents if not name.startswith(("decoder_", "encoder_"))]
    own = others[0] if others else "attentions"
    if sides == {"self"}:
        if others and decoder in contents:
            raise HeadprobeError(
                f"the inputs are {own!r} and {decoder!r}, the maps those of one stack: say whose, "
                "as {'encoder_attentions': maps} or {'decoder_attentions': maps}"
            )
        own = own if others or decoder not in contents else decoder
    if "self" in sides:
        return {"self": (own, own), "cross": (own, encoder)}
    return {"encoder": (own, own), "decoder": (decoder, decoder), "cross": (decoder, own)}


def _texts(
    maps: list[GivenMap],
    streams: Mapping[Side, tuple[str | None, str | None]],
    inputs: Mapping[str, Tensor],
    seed: int,
    classes: Mapping[str, Iterable[int]],
) -> Texts:
    """What is known of the texts; in place of an input that was not given stands the first map."""
    batch = dict(inputs)
    for given in maps:
        weights = _weights(given)
        rows = {2: weights.transpose(1, 2), 3: weights.permute(0, 3, 1, 2)}
        for axis, stream in zip((2, 3), streams[given.side], strict=True):
            assert stream is not None
            positions = [weights.shape[0], weights.shape[axis]]
            if stream not in batch:
                batch[stream] = rows[axis]
                batch.setdefault(mask_of(stream), weights.new_ones(positions))
            for name in (stream, mask_of(stream)):
                _check_axes(given.site, name, batch.get(name), positions)
    return read_batch(batch, seed=seed, token_classes=classes)


def _check_axes(site: str, name: str, tensor: Tensor | None, positions: list[int]) -> None:
    if tensor is None:
        return
    axes, is_mask = list(tensor.shape), "mask" in name
    # Pictures and sounds have axes of their own: a model makes positions from them.
    known = 2 if is_mask or not tensor.is_floating_point() else 1
    if axes[:known] != positions[:known] or (is_mask and axes[2:]):
        raise ValueError(
            f"{name} is {axes}, the maps of {site!r} have {positions} [batch, positions]: expected "
            "the same (windows and beams can't be given; after generate, give the ids and the mask "
            "of the whole text without its last token)"
        )
    if is_mask and not bool(((tensor == 0) | (tensor == 1)).all()):
        raise ValueError(f"{name} has other entries than 0 and 1: 1 is a token, 0 is padding")


def _call(
    given: GivenMap, streams: tuple[str | None, str | None], inputs: Mapping[str, Tensor]
) -> AttentionCall:
    return AttentionCall(
        site=given.site,
        call=0,
        seam="given",
        streams=streams,
        value=None,
        weights=given.weights,
        no_projection="only the map was given",
        places=_places(inputs.get(streams[0] or ""), _weights(given).shape[2]),
    )


def _places(read: Tensor | None, positions: int) -> Places:
    if read is None or (read.dim() == _SEQUENCE_AXES and read.shape[1] == positions):
        return Places("positions")
    if not read.is_floating_point():
        return Places("tokens")
    return Places("", "only the map was given, not how the model made positions of its input")


_SEQUENCE_AXES = 3  # [batch, positions, features]
