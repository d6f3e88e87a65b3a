"""Where the positions of an attention call lie, in the unit that its distances are measured in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headprobe.capture import AttentionCall, Places
from headprobe.profile.texts import Texts

_OF_WHOLE_TEXTS = frozenset(("first", "sink"))
_OF_KNOWN_MASKS = frozenset(("entropy_normalized", "distance_ratio"))


@dataclass(frozen=True, eq=False)
class Located:
    """What the statistics have to know of a call's places.

    Attributes:
        unit: of distances; empty if there is none.
        reason: why there is none, though queries and keys are the same positions.
        coordinates: [1 or sequences, positions, axes] in this unit, NaN for what is no place; None
            where position i lies at i.
        texts: the sequences of the call's map.
        left_out: names of statistics that say nothing here.
        layout: tells calls apart whose rows are not the same positions; empty for whole sequences.
    """

    unit: str
    reason: str
    coordinates: Tensor | None
    texts: Texts
    left_out: frozenset[str]
    layout: str

    def classes(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """Token class -> True for the keys in it, [batch, keys]; what is no place is special."""
        classes = dict(self.texts.classes_of(call.streams[1], call.keys, call.device))
        if self.coordinates is not None:
            nowhere = self.coordinates.isnan().any(dim=-1).expand(call.batch, -1)
            if bool(nowhere.any()):
                classes["special"] = nowhere
        return classes


def locate(call: AttentionCall, texts: Texts) -> Located:
    """Lay a call's places over the batch.

    Args:
        call: the attention call.
        texts: the batch that the model runs on.
    """
    places, stream = call.places, call.streams[0]
    if stream != call.streams[1] or call.queries != call.keys:
        places = Places("")  # no key is a query
    unit, coordinates = str(places.unit), places.coordinates
    seconds = texts.seconds.get(stream or "")
    if seconds is not None and unit in ("frames", "positions"):
        if coordinates is None:
            index = torch.arange(call.keys, dtype=torch.float32, device=call.device)
            coordinates = index[None, :, None]
        unit, coordinates = "seconds", coordinates * seconds
    left_out, layout = frozenset[str](), ""
    if places.sequences is not None and stream not in texts.valid:
        texts = texts.windows(places.sequences.tolist())
        left_out = _OF_WHOLE_TEXTS | (_OF_KNOWN_MASKS if _wrapped(places) else frozenset())
        layout = _digest(places)
    if coordinates is not None and bool(_same(coordinates, coordinates[:1]).all()):
        coordinates = coordinates[:1]
    return Located(unit, places.reason, coordinates, texts, left_out, layout)


def _same(first: Tensor, second: Tensor) -> Tensor:
    return (first == second) | (first.isnan() & second.isnan())


def _wrapped(places: Places) -> bool:
    """Whether some windows are no patch of the picture as it is, but go round its edges.

    Models forbid such pairs with a bias that a strong score could overcome (-100), so that it can't
    be told from the map how many keys a row may see.
    """
    if places.coordinates is None:
        return False
    offsets = places.coordinates - places.coordinates[:, :1]
    return not torch.allclose(offsets, offsets[:1].expand_as(offsets), equal_nan=True)


def _digest(places: Places) -> str:
    assert places.sequences is not None
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (places.sequences, places.coordinates):
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
