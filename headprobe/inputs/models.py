"""Models by hub name, by folder, or the embedded default, with their tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.adapters import base_of, described, is_adapter, merged
from headprobe.inputs.devices import find_device
from headprobe.inputs.failures import TOKENIZER, explaining, needs_code, needs_extra
from headprobe.inputs.limits import max_positions
from headprobe.inputs.places import ADAPTER, CONFIG, TOKENIZER_FILES, Place, locate
from headprobe.inputs.processors import TEXT, load_processor, reads
from headprobe.inputs.quiet import quiet
from headprobe.inputs.weights import load_weights

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")

_SMALL_VOCABULARY = 256  # T5's made-up one has 104 entries; files may have other names than these


@dataclass(frozen=True)
class Parts:
    """What a model is put together from.

    Attributes:
        model: a folder with config.json, a GGUF file, or a name on the Hugging Face hub; None is
            the embedded default.
        gguf: a GGUF file in that folder, or at that hub name.
        tokenizer: a folder or hub name that the tokenizer is taken from instead.
        base: where `model` is an adapter, the folder or hub name of its base model, instead of the
            one that the adapter names.
        revision: branch, tag or commit of `model` on the hub; None is its main branch.
    """

    model: str | None = None
    gguf: str | None = None
    tokenizer: str | None = None
    base: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Source:
    """A loaded model with its tokenizer, and where they come from.

    Attributes:
        model: the model.
        tokenizer: its tokenizer; None for a module that a person's own code made.
        name: a short name, safe as the name of a folder.
        class_name: the model's class.
        revision: the hub's commit, for a model from the hub.
        weights_sha256: SHA-256 of the weight file, for a model from a folder; of several weight
            files one after the other, in the order of their names.
        dtype: of the model's weights; None if it has none.
        max_positions: the most tokens that the model can read, special ones included; None if it
            has no such limit.
        made_of: for a merged adapter: what `adapter` and `base` were; otherwise empty.
        reads: which of text, images and sound can be given to the model by themselves.
        processors: "images" or "sound" -> loads what prepares them for the model.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    class_name: str
    revision: str | None
    weights_sha256: str | None
    dtype: torch.dtype | None
    max_positions: int | None
    made_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reads: frozenset[str] = frozenset((TEXT,))
    processors: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model's inputs belong.

        A model that is spread over devices moves its inputs itself, and the weights that it keeps
        elsewhere until they are needed look as if they were on the device "meta".
        """
        import torch

        devices = (weight.device for weight in self.model.parameters() if not weight.is_meta)
        return next(devices, torch.device("cpu"))

    @property
    def places(self) -> list[str]:
        """Where the model's weights are kept, in words: devices, and "disk"."""
        spread = getattr(self.model, "hf_device_map", None) or {"": self.device}
        return sorted({f"cuda:{at}" if isinstance(at, int) else str(at) for at in spread.values()})

    @property
    def reader(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            HeadprobeError: if there is none.
        """
        if self.tokenizer is None:
            raise HeadprobeError(f"{self.name!r} has no tokenizer: it can't be run on texts.")
        return self.tokenizer

    def processor(self, kind: str) -> Any:  # noqa: ANN401
        """What prepares "images" or "sound" for the model.

        Raises:
            HeadprobeError: if the model can't be run on such, or comes without a processor.
        """
        if kind not in self.processors:
            raise HeadprobeError(
                f"{self.name!r} takes no {kind}: it reads {' and '.join(sorted(self.reads))}."
            )
        with quiet():
            return self.processors[kind]()


def load_model(
    model: str | Parts | None = None,
    *,
    device: str = "cpu",
    device_map: str | dict[str, Any] | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Source:
    """Load a model and its tokenizer; nothing pickled is executed.

    Args:
        model: a folder with config.json, a GGUF file, or a name on the Hugging Face hub, or
            several parts; None is the embedded default of the extra `demo`.
        device: a torch device such as "cpu", "cuda" or "cuda:1"; "auto" is the fastest here.
        device_map: instead of `device`: "auto" spreads the model over all devices, and over the
            disk where they are too small; other maps are accelerate's.
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        trust_remote_code: run Python code that comes with the model. Never without asking for it.

    Raises:
        HeadprobeError: if the model can't be found, reached or read, lacks a tokenizer or weights
            that its attention needs, needs code of its own, or the device is not there.
        ValueError: if `dtype` is none of the above, or device and device_map are both given.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}.")
    if device_map is not None and device != "cpu":
        raise ValueError(f"device {device!r} and a device map are given: expected one of them.")
    target = find_device(device)
    parts = model if isinstance(model, Parts) else Parts(model)
    with quiet():
        place = locate(
            parts.model,
            trusted=trust_remote_code,
            revision=parts.revision,
            gguf=parts.gguf,
            needs=(CONFIG, ADAPTER),
        )
        base = _base(place, parts)
        if device_map is not None and place is not base:
            raise HeadprobeError(
                f"{place.label!r} is an adapter, which is merged on one device: leave the device "
                "map out, or merge it first and save the model."
            )
        with place.checked(), base.checked():
            config = _load_config(base)
            loaded = load_weights(base, config, dtype, device_map).eval()
            if place is not base:
                loaded = merged(loaded, place)
        if device_map is None:
            loaded = loaded.to(target)
        kinds = reads(loaded)
        tokenizer = _load_tokenizer(
            _tokenizer_place(parts, place, base), config, needed=TEXT in kinds or parts.tokenizer
        )
    own = place is base
    return Source(
        model=loaded,
        tokenizer=tokenizer,
        name=place.name,
        class_name=type(loaded).__name__,
        # Merged weights are in no file.
        revision=place.revision if own else None,
        weights_sha256=place.weights_sha256 if own else None,
        dtype=loaded.dtype,
        max_positions=None if tokenizer is None else max_positions(loaded, tokenizer),
        made_of={} if own else described(place, base),
        reads=kinds,
        processors={kind: partial(load_processor, base, kind) for kind in kinds - {TEXT}},
    )


def _base(place: Place, parts: Parts) -> Place:
    """Where the model's own weights lie: for an adapter, its base."""
    if place.gguf:
        needs_extra(["gguf", "accelerate"], "gguf", "reading a GGUF file")
    if is_adapter(place):
        return base_of(place, parts.base)
    if parts.base is not None:
        raise HeadprobeError(
            f"{place.label!r} has no adapter_config.json: --base {parts.base!r} is for an adapter."
        )
    return place


# --- loading ---


def _load_config(place: Place) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

    with explaining(place.label, "the configuration"):
        raw, _ = PretrainedConfig.get_config_dict(place.address, **place.options)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    own_code = isinstance(raw, dict) and "AutoConfig" in raw.get("auto_map", {})
    if kind not in CONFIG_MAPPING and not own_code:
        raise HeadprobeError(
            f"model type {kind!r} in the config.json of {place.label!r} is not known to "
            f"transformers {__version__}: correct it, or update transformers."
        )
    if kind not in CONFIG_MAPPING and not place.trusted:
        raise needs_code(place.address)
    with explaining(place.label, "the configuration"):
        return AutoConfig.from_pretrained(place.address, **place.options)


def _tokenizer_place(parts: Parts, place: Place, base: Place) -> Place:
    if parts.tokenizer is not None:
        return locate(parts.tokenizer, trusted=place.trusted, needs=TOKENIZER_FILES)
    return place if place is base or place.fetch("tokenizer_config.json") else base


def _load_tokenizer(
    place: Place, config: PretrainedConfig, *, needed: object
) -> PreTrainedTokenizerBase | None:
    """The tokenizer; if it is not needed, for what a decoder of speech says, None without one."""
    try:
        return _read_tokenizer(place, config)
    except HeadprobeError:
        if needed:
            raise
        return None


def _read_tokenizer(place: Place, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    # Where a tokenizer lies alone, the model's configuration says of which kind it is.
    alone = place.fetch("config.json") is None
    with explaining(place.label, TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(
            place.address, config=config if alone else None, **place.options
        )
    # Without files transformers makes up a tokenizer, whose vocabulary is special tokens only.
    names = set((tokenizer.vocab_files_names or {}).values())
    is_small = len(tokenizer) < _SMALL_VOCABULARY
    if not place.gguf and names and is_small and not any(place.file(name) for name in names):
        raise HeadprobeError(
            f"{place.label!r} has no tokenizer: expected one of {', '.join(sorted(names))} "
            "beside config.json; copy the files from where the model comes from, or name a place "
            "that has them with --tokenizer."
        )
    return tokenizer
