"""Models by hub name, by folder, or the embedded default, with their tokenizers."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.adapters import find_adapter, merged
from headprobe.inputs.failures import explaining, needs_code
from headprobe.inputs.places import Place, folder_name, locate
from headprobe.inputs.processors import TEXT, load_processor, reads
from headprobe.inputs.quiet import quiet

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")

_NO_LIMIT = 10**6  # tokenizers without a limit carry a huge number instead
_SMALL_VOCABULARY = 256  # T5's made-up one has 104 entries; files may have other names than these


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
        adapter_sha256: SHA-256 of the weights of the adapter that was merged into the model.
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
    adapter_sha256: str | None = None
    reads: frozenset[str] = frozenset((TEXT,))
    processors: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

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
    model: str | None = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    gguf: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
) -> Source:
    """Load a model and its tokenizer; nothing pickled is executed.

    Args:
        model: a folder with config.json, a GGUF file, a folder with a PEFT adapter (merged into
            its base), or a name on the Hugging Face hub; None is the embedded default of the extra
            `demo`.
        device: a torch device such as "cpu", "cuda" or "cuda:1"; "auto" is the first of cuda, mps
            and cpu that is there.
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        trust_remote_code: run Python code that comes with the model. Never without asking for it.
        gguf: a GGUF file in the folder or on the hub, to take instead of other weights.
        tokenizer: folder or hub name to take the tokenizer from, instead of the model's.
        base: folder or hub name of the model below an adapter; None is what the adapter names.

    Raises:
        HeadprobeError: if the model can't be found, reached or read, lacks a tokenizer or weights
            that its attention needs, needs code of its own, or the device is not there.
        ValueError: if `dtype` is none of the above.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}.")
    target = _device(device)
    with quiet():
        adapter = find_adapter(model, base)
        place = locate(adapter.base if adapter else model, trusted=trust_remote_code, gguf=gguf)
        config = _load_config(place)
        loaded = _load_weights(place, config, dtype, adapter.base_class if adapter else None)
        if adapter:
            loaded = merged(loaded, adapter)
        loaded = loaded.eval().to(target)
        kinds = reads(loaded)
        if tokenizer:
            reader: PreTrainedTokenizerBase | None = _load_tokenizer(
                locate(tokenizer, trusted=trust_remote_code, any_folder=True)
            )
        else:
            reader = _load_tokenizer(place) if TEXT in kinds else _tokenizer_if_any(place)
    return Source(
        model=loaded,
        tokenizer=reader,
        name=folder_name(adapter.folder.resolve().name) if adapter else place.name,
        adapter_sha256=adapter.sha256 if adapter else None,
        class_name=type(loaded).__name__,
        revision=place.revision,
        weights_sha256=place.weights_sha256,
        dtype=loaded.dtype,
        max_positions=None if reader is None else _max_positions(loaded, reader),
        reads=kinds,
        processors={kind: partial(load_processor, place, kind) for kind in kinds - {TEXT}},
    )


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        name = next((kind for kind, is_there in there.items() if is_there), "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            known.append("mps")
        raise HeadprobeError(
            f"device {name!r} is unknown or not available: this machine has {', '.join(known)}."
        ) from error
    if device.type == "meta":
        raise HeadprobeError("device 'meta' computes nothing: use 'cpu' or 'cuda'.")
    return device


# --- loading ---


def _load_config(place: Place) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

    with explaining(place.address, "the configuration"):
        raw, _ = PretrainedConfig.get_config_dict(place.address, **place.options)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    own_code = isinstance(raw, dict) and "AutoConfig" in raw.get("auto_map", {})
    if kind not in CONFIG_MAPPING and not own_code:
        raise HeadprobeError(
            f"model type {kind!r} in the config.json of {place.address!r} is not known to "
            f"transformers {__version__}: correct it, or update transformers."
        )
    if kind not in CONFIG_MAPPING and not place.trusted:
        raise needs_code(place.address)
    with explaining(place.address, "the configuration"):
        return AutoConfig.from_pretrained(place.address, **place.options)


def _load_tokenizer(place: Place) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with explaining(place.address, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place.address, **place.options)
    # Without files transformers makes up a tokenizer, whose vocabulary is special tokens only.
    names = set((tokenizer.vocab_files_names or {}).values())
    is_small = len(tokenizer) < _SMALL_VOCABULARY
    if place.gguf is None and names and is_small and not any(place.file(name) for name in names):
        raise HeadprobeError(
            f"{place.address!r} has no tokenizer: expected one of {', '.join(sorted(names))} "
            "beside config.json; copy the files from where the model comes from."
        )
    return tokenizer


def _tokenizer_if_any(place: Place) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model that can do without: for what a decoder of speech says."""
    try:
        return _load_tokenizer(place)
    except HeadprobeError:
        return None


def _load_weights(
    place: Place, config: PretrainedConfig, dtype: str, class_name: str | None = None
) -> PreTrainedModel:
    import transformers

    kind = getattr(transformers, class_name) if class_name else _model_class(place, config)
    with explaining(place.address, "the weights"), _no_bar_in_files(place):
        model, loading = kind.from_pretrained(
            place.address,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            # Its error would name no weight; the one below does.
            ignore_mismatched_sizes=True,
            **place.options,
        )
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise HeadprobeError(
            f"weight {key} of {place.address!r} has shape {list(stored)}, its config.json asks for "
            f"{list(expected)}: the two files don't belong together."
        )
    missing = sorted(set(loading["missing_keys"]) & _attention_weights(model))
    if missing:
        raise HeadprobeError(
            f"{place.address!r} lacks {len(missing)} weights of {type(model).__name__} "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}), so its attention would "
            "be random: do the weights belong to this config.json?"
        )
    return model


@contextmanager
def _no_bar_in_files(place: Place) -> Iterator[None]:
    """GGUF files are read behind a bar that no setting of transformers turns off."""
    if place.gguf is None or sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


def _model_class(place: Place, config: PretrainedConfig) -> type[PreTrainedModel]:
    import transformers

    own = {
        path.split(".")[-1]: auto
        for auto, path in (getattr(config, "auto_map", None) or {}).items()
        if auto.startswith("AutoModel")
    }
    # With code of its own, a class is loaded through the Auto class that it is registered for.
    trusted = own if place.trusted else {}
    names = [trusted.get(name, name) for name in config.architectures or []]
    known = [name for name in names if hasattr(transformers, name)]
    if own and not known and not place.trusted:
        raise needs_code(place.address)
    fallback = "AutoModelForCausalLM" if place.gguf else "AutoModel"
    chosen = [*known, *trusted.values(), fallback][0]
    model_class: type[PreTrainedModel] = getattr(transformers, chosen)
    return model_class


def _attention_weights(model: PreTrainedModel) -> set[str]:
    """The parameters that attention depends on: those of the base model without its pooler."""
    base, output = model.base_model, model.get_output_embeddings()
    inner = {id(weight) for weight in base.parameters()}
    if base is model and output is not None:
        # Without a separate base model the head lies in it; tied to the input, it stays.
        inner -= {id(weight) for weight in output.parameters()}
        inner |= {id(weight) for weight in model.get_input_embeddings().parameters()}
    return {
        name
        for name, weight in model.named_parameters(remove_duplicate=False)
        if id(weight) in inner and "pooler" not in name
    }


# --- its limits ---


def _max_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    config = model.config.get_text_config()
    names = ["max_position_embeddings"]
    if not hasattr(config, "relative_attention_num_buckets"):
        # Relative positions have no end; old configurations name one nonetheless.
        names += ["n_positions", "max_seq_len", "n_ctx"]
    declared = [getattr(config, name, None) for name in names]
    table = next((n for n in declared if isinstance(n, int) and n > 0), None)
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < _NO_LIMIT else []
    if table:
        limits.append(table - _first_position(model, table))
    return min(limits, default=None)


def word_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """The table of a model's words; None if it has none."""
    from torch import nn

    try:
        words: nn.Module = model.get_input_embeddings()
        return words
    except NotImplementedError:  # a model of several towers: transformers doesn't say whose
        size = getattr(model.config.get_text_config(), "vocab_size", None)
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
        return next((table for table in tables if table.num_embeddings == size), None)


def _first_position(model: PreTrainedModel, table: int) -> int:
    """Positions may start after the padding row of their table, which is shorter by that."""
    from torch import nn

    words = word_embeddings(model)
    for module in model.modules():
        is_positions = isinstance(module, nn.Embedding) and module is not words
        if is_positions and module.num_embeddings == table and module.padding_idx is not None:
            return int(module.padding_idx) + 1
    return 0
