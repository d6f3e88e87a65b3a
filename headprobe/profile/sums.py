"""A profile: everything that was measured of a model's heads, as sums that merge."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headprobe.errors import HeadprobeError
from headprobe.profile.names import Place, places
from headprobe.statistics import LAYER_STATISTICS, STATISTICS, PairSums, Statistic

if TYPE_CHECKING:
    import pandas as pd

Address = tuple[str, int]
"""A module's name, and how many calls it made before in the same pass."""

_FORMAT = 2
_CLASSES: dict[str, type[Statistic]] = {s.name: s for s in (*STATISTICS, *LAYER_STATISTICS)}


@dataclass(frozen=True)
class Layer:
    """What was measured of the heads of one attention call.

    Attributes:
        site: the module's name.
        call: how many calls the module made before in the same pass.
        seam: where the call was seen (`AttentionCall.seam`), or `given` of a map that was.
        streams: the inputs that the positions of queries and keys come from.
        heads: number of query heads.
        kv_heads: number of key and value heads; None where only maps were given.
        dims: width of a head's queries and of its values; None where that is not known: the model
            made the scores itself, or only maps were given.
        output_site: the module that W_O belongs to; empty if it is not known.
        no_projection: why W_O is not known; empty if it is.
        is_cross: whether queries and keys come from different sequences.
        distance_unit: tokens, positions, pixels, frames or seconds; empty if no distance is known.
        no_distance: why none is known, though there is one.
        later_keys: how many keys after their query the valid rows might see; 0 if causal.
        reconstruction_error: largest relative difference between weights · V and what the model
            computed; None where the two can't be compared.
        row_sums: least and largest sum of a row's weights, of the rows that were looked at.
        padding_mass: largest weight on a key that is padding; None if no text was padded.
        statistics: name -> sums by resampling block.
    """

    site: str
    call: int
    seam: str
    streams: tuple[str | None, str | None]
    heads: int
    kv_heads: int | None
    dims: tuple[int | None, int | None]
    output_site: str
    no_projection: str
    is_cross: bool
    distance_unit: str
    no_distance: str
    later_keys: int
    reconstruction_error: float | None
    row_sums: tuple[float, float]
    padding_mass: float | None
    statistics: dict[str, Statistic] = field(repr=False)

    @property
    def address(self) -> Address:
        """Which call of which module this is."""
        return self.site, self.call

    @property
    def kind(self) -> str:
        """`cross`, `causal` (no valid row may see a key after it) or `bidirectional`."""
        if self.is_cross:
            return "cross"
        return "bidirectional" if self.later_keys else "causal"

    def __add__(self, other: Layer) -> Layer:
        low, high = zip(self.row_sums, other.row_sums, strict=True)
        kv_heads = [e.kv_heads for e in (self, other)]
        return replace(
            self,
            # Heads that share keys share them in every text; others may look alike in one.
            kv_heads=max((n for n in kv_heads if n is not None), default=None),
            no_projection=self.no_projection or other.no_projection,
            is_cross=self.is_cross or other.is_cross,
            distance_unit=self.distance_unit if self.distance_unit == other.distance_unit else "",
            no_distance=self.no_distance or other.no_distance,
            later_keys=self.later_keys + other.later_keys,
            reconstruction_error=_largest(self.reconstruction_error, other.reconstruction_error),
            row_sums=(min(low), max(high)),
            padding_mass=_largest(self.padding_mass, other.padding_mass),
            statistics={
                name: sums + other.statistics[name]
                for name, sums in self.statistics.items()
                if name in other.statistics
            },
        )


@dataclass(frozen=True)
class Profile:
    """Everything that was measured of a model's heads on some texts; `+` adds other texts.

    Attributes:
        measured: the attention calls that were measured, in the model's order.
        pair_sums: similarities of the heads of two layers.
        left_out: site -> why its attention is not in the profile.
        texts: number of texts.
        tokens: number of tokens.
        class_tokens: input name -> token class -> how many of the input's tokens are in it.
        settings: what the measurement depends on: the seed, the numbers of sampled rows, the model.
        switched: attention kernel of the model -> what ran instead, to be seen.
    """

    measured: tuple[Layer, ...] = ()
    pair_sums: dict[tuple[Address, Address], PairSums] = field(default_factory=dict, repr=False)
    left_out: dict[str, str] = field(default_factory=dict)
    texts: int = 0
    tokens: int = 0
    class_tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    switched: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Profile) -> Profile:
        """Merge with a profile of other texts.

        Raises:
            HeadprobeError: if the two are of different models or made with different settings.
        """
        if not other.texts:
            return self
        if not self.texts:
            return other
        for name in self.settings.keys() | other.settings.keys():
            mine, theirs = self.settings.get(name), other.settings.get(name)
            if mine != theirs:
                raise HeadprobeError(
                    f"profiles with different {name} can't be merged: {mine!r} and {theirs!r}; "
                    "make both with the same model and settings"
                )
        left_out = self.left_out | other.left_out
        layers = {layer.address: layer for layer in self.measured}
        for layer in other.measured:
            mine_too = layers.get(layer.address)
            layers[layer.address] = layer if mine_too is None else mine_too + layer
        pairs = dict(self.pair_sums)
        for key, sums in other.pair_sums.items():
            pairs[key] = pairs[key] + sums if key in pairs else sums
        return Profile(
            measured=tuple(layer for layer in layers.values() if layer.site not in left_out),
            pair_sums={
                key: sums for key, sums in pairs.items() if not {a[0] for a in key} & set(left_out)
            },
            left_out=left_out,
            texts=self.texts + other.texts,
            tokens=self.tokens + other.tokens,
            class_tokens=_added(self.class_tokens, other.class_tokens),
            settings=self.settings,
            switched=self.switched | other.switched,
        )

    def places(self) -> list[Place]:
        """Stack and layer of each of `measured`."""
        return places(
            [layer.site for layer in self.measured], [layer.kind for layer in self.measured]
        )

    def heads(self) -> pd.DataFrame:
        """A row per head: what it is and every statistic."""
        from headprobe.profile.tables import heads

        return heads(self)

    def pairs(self) -> pd.DataFrame:
        """A row per pair of heads, first before second: the measures of similarity."""
        from headprobe.profile.tables import pairs

        return pairs(self)

    def layers(self) -> pd.DataFrame:
        """A row per layer: means over its heads, and the statistics of the layer."""
        from headprobe.profile.tables import layers

        return layers(self)

    def intervals(self) -> pd.DataFrame:
        """A row per head and statistic: a 95 % bootstrap interval over the resampling blocks."""
        from headprobe.profile.tables import intervals

        return intervals(self)

    def save(self, path: str | Path) -> None:
        """Write the sums to a safetensors file."""
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.measured):
            for name, sums in layer.statistics.items():
                tensors[f"layers/{index}/{name}/total"] = sums.total.contiguous()
                tensors[f"layers/{index}/{name}/count"] = sums.count.contiguous()
        order = {layer.address: index for index, layer in enumerate(self.measured)}
        for (first, second), pair in self.pair_sums.items():
            tensors[f"pairs/{order[first]}/{order[second]}/total"] = pair.total.contiguous()
            tensors[f"pairs/{order[first]}/{order[second]}/count"] = pair.count.contiguous()
        described = {
            "format": _FORMAT,
            "layers": [_described(layer) for layer in self.measured],
            "left_out": self.left_out,
            "texts": self.texts,
            "tokens": self.tokens,
            "class_tokens": self.class_tokens,
            "settings": self.settings,
            "switched": self.switched,
        }
        contents = save(tensors, metadata={"headprobe": json.dumps(described)})
        Path(path).write_bytes(contents)  # safetensors' own file can be read by its owner only

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            HeadprobeError: if the file is not a profile, or of another version of the format.
        """
        try:
            with safe_open(path, framework="pt") as file:
                described = json.loads((file.metadata() or {}).get("headprobe", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise HeadprobeError(f"{path} is not a profile that can be read: {error}") from error
        if not described:
            raise HeadprobeError(f"{path} is not a headprobe profile: give what `save` wrote")
        if described["format"] != _FORMAT:
            raise HeadprobeError(
                f"{path} has profile format {described['format']}, expected {_FORMAT}: "
                "make it again with this version of headprobe"
            )
        layers = tuple(
            _layer(index, layer, tensors) for index, layer in enumerate(described.pop("layers"))
        )
        pair_sums = {}
        for name in tensors:
            if name.startswith("pairs/") and name.endswith("/total"):
                _, first, second, _ = name.split("/")
                key = layers[int(first)].address, layers[int(second)].address
                pair_sums[key] = PairSums(tensors[name], tensors[f"pairs/{first}/{second}/count"])
        del described["format"]
        return cls(measured=layers, pair_sums=pair_sums, **described)


def _added(
    first: dict[str, dict[str, int]], second: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    return {
        stream: {
            name: counts[0].get(name, 0) + counts[1].get(name, 0) for name in counts[0] | counts[1]
        }
        for stream in first | second
        for counts in [(first.get(stream, {}), second.get(stream, {}))]
    }


def _largest(first: float | None, second: float | None) -> float | None:
    return max((one for one in (first, second) if one is not None), default=None)


def _described(layer: Layer) -> dict[str, Any]:
    named = {name: getattr(layer, name) for name in Layer.__dataclass_fields__}
    return named | {"statistics": list(layer.statistics)}


def _layer(index: int, described: dict[str, Any], tensors: dict[str, Tensor]) -> Layer:
    statistics = {
        name: _CLASSES[name](
            tensors[f"layers/{index}/{name}/total"], tensors[f"layers/{index}/{name}/count"]
        )
        for name in described["statistics"]
    }
    pairs = {name: tuple(described[name]) for name in ("streams", "dims", "row_sums")}
    return Layer(**described | {"statistics": statistics} | pairs)
