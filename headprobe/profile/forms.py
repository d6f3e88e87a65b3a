"""The forms in which people keep attention maps, read as a list of maps with names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headprobe.errors import HeadprobeError

Side = Literal["self", "encoder", "decoder", "cross"]

# What transformers' outputs call the maps of each side.
_SIDES: dict[str, Side] = {
    "encoder_attentions": "encoder",
    "attentions": "self",
    "decoder_attentions": "decoder",
    "cross_attentions": "cross",
}
_HOOK = "hook_pattern"

_GET_MAPS = (
    "load the model with attn_implementation='eager' and call it with output_attentions=True, or "
    "run headprobe.profile(model, batches), which needs neither"
)


@dataclass(frozen=True, eq=False)
class GivenMap:
    """The attention map of one layer, as it was given.

    Attributes:
        site: its key in a mapping, or a name made of its place, like `layer.3`.
        side: which attention it is.
        weights: [batch, heads, queries, keys], or None where a layer has none.
    """

    site: str
    side: Side
    weights: Tensor | None


def read_maps(attentions: Any) -> list[GivenMap]:  # noqa: ANN401 - these forms are the point
    """The maps of all layers, in the order in which the model calls them.

    Args:
        attentions: see `from_attentions`.

    Raises:
        HeadprobeError: if there are no maps in it, or they can't be put together.
        TypeError: if it is nothing that holds maps.
    """
    if not hasattr(attentions, "keys"):
        return _layers(attentions, "self", "layer.{}")
    if "beam_indices" in attentions and attentions["beam_indices"] is not None:
        raise HeadprobeError(
            "the maps come from beam search, where a row's history may be another beam's: run the "
            "model once on the generated ids, and give the maps of that"
        )
    found = {name: attentions[name] for name in _SIDES if name in attentions}
    found = {name: maps for name, maps in found.items() if maps is not None}
    if any(len(maps) for maps in found.values()):  # a model without cross-attention gives ()
        return _sides({name: maps for name, maps in found.items() if len(maps)})
    if found:
        raise HeadprobeError(f"{next(iter(found))!r} is empty (sdpa makes no maps): {_GET_MAPS}")
    keys = [key for key in attentions if str(key).endswith(_HOOK)]
    if not keys:
        raise HeadprobeError(
            f"there are no attention maps under {_named(attentions)}: "
            f"expected {', '.join(map(repr, _SIDES))} or keys like 'blocks.0.attn.{_HOOK}'; "
            + _GET_MAPS
        )
    return [GivenMap(key, _side_of(key), _tensor(attentions[key], key)) for key in keys]


def _named(keys: Iterable[Any]) -> str:
    names = [repr(key) for key in keys]
    return ", ".join(names[:5] + ["..."] * (len(names) > 5)) or "no key"


def _side_of(key: str) -> Side:
    path = key.split(".")
    if any("cross" in part for part in path):
        return "cross"
    if path[0] in ("encoder", "decoder"):
        return "encoder" if path[0] == "encoder" else "decoder"
    return "self"


def _sides(found: dict[str, Any]) -> list[GivenMap]:
    """The encoder's maps, then layer by layer the decoder's own and its cross-attention."""
    stack = "layer.{}" if "attentions" in found else "decoder.layer.{}"
    names = {"self": stack, "decoder": stack, "cross": stack + ".cross"}
    maps = {
        side: _layers(found[name], side, names.get(side, "encoder.layer.{}"))
        for name, side in _SIDES.items()
        if name in found
    }
    encoder = maps.pop("encoder", [])
    layers = zip_longest(*maps.values())
    return [*encoder, *(given for layer in layers for given in layer if given is not None)]


def _layers(layers: Any, side: Side, name: str) -> list[GivenMap]:  # noqa: ANN401
    if isinstance(layers, str) or not (isinstance(layers, Sequence) or hasattr(layers, "shape")):
        raise TypeError(
            f"attentions is a {type(layers).__name__}: expected a tensor or array "
            "[batch, heads, queries, keys] per layer, or a mapping of such"
        )
    if hasattr(layers, "shape") and len(layers.shape) not in (4, 5):
        raise HeadprobeError(
            f"the maps are one array {list(layers.shape)}: expected [layers, batch, heads, "
            "queries, keys], [layers, heads, queries, keys] for one text, or a list with an array "
            "per layer"
        )
    if not len(layers):
        raise HeadprobeError(f"the attentions are empty (sdpa makes no maps): {_GET_MAPS}")
    if isinstance(layers[0], Sequence) and not isinstance(layers[0], str):
        return list(_stitched(layers, side, name))
    return [
        GivenMap(name.format(i), side, _tensor(layer, name.format(i)))
        for i, layer in enumerate(layers)
    ]


def _tensor(given: Any, site: str) -> Tensor | None:  # noqa: ANN401
    """[batch, heads, queries, keys] from a tensor or array, None from None."""
    if given is None:
        return None
    weights = given.detach() if isinstance(given, Tensor) else _of_array(given, site)
    if weights.dim() == 3:
        weights = weights[None]
    if weights.dim() != 4:
        raise HeadprobeError(
            f"{site!r} is {list(weights.shape)}: expected [batch, heads, queries, keys], or "
            "[heads, queries, keys] for one text"
        )
    return weights if weights.is_floating_point() else weights.float()


def _of_array(given: Any, site: str) -> Tensor:  # noqa: ANN401
    array = np.asarray(given)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{site!r} is a {type(given).__name__}: expected a tensor or an array")
    # A copy of its own, since torch can't take every layout and order of bytes.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))


def _stitched(steps: Sequence[Any], side: Side, name: str) -> Iterator[GivenMap]:
    """Whole maps from those of generation: per step, a map of the new rows per layer."""
    for i in range(len(steps[0])):
        site = name.format(i)
        if any(len(step) != len(steps[0]) for step in steps):
            raise HeadprobeError("the steps of generation have maps of unlike numbers of layers")
        maps = [_tensor(step[i], site) for step in steps]
        rows = [weights for weights in maps if weights is not None]
        if len(rows) < len(maps):
            yield GivenMap(site, side, None)
            continue
        yield GivenMap(site, side, _whole(rows, site, is_cross=side == "cross"))


def _whole(steps: list[Tensor], site: str, *, is_cross: bool) -> Tensor:
    """One map from those of the steps, [batch, heads, queries, keys]."""
    queries, keys = ([weights.shape[axis] for weights in steps] for axis in (2, 3))
    one_batch = len({weights.shape[:2] for weights in steps}) == 1
    # What the keys are once a step's rows are added; cross-attention has all of them at once.
    grown = [keys[0]] * len(keys) if is_cross else list(accumulate(queries))
    one_by_one = not is_cross or set(queries[1:]) <= {1}
    if one_batch and keys == grown and one_by_one:
        padded = [F.pad(weights, (0, keys[-1] - weights.shape[3])) for weights in steps]
        return torch.cat(padded, dim=2)
    # Without a cache each step makes all rows anew.
    anew = range(queries[0], queries[0] + len(queries)) if is_cross else keys
    if one_batch and queries == list(anew) and (not is_cross or keys == grown):
        return steps[-1]
    shapes = ", ".join(f"{q} x {k}" for q, k in list(zip(queries, keys, strict=True))[:3])
    raise HeadprobeError(
        f"the steps of generation don't fit together in {site!r} (maps of {shapes} ...; a window, "
        "a static cache, or beams): run the model once on the generated ids, and give those maps"
    )
