"""SHA-256 of the files that a model's weights lie in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_WEIGHT_FILES = (  # in the order in which transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def weights_sha256(folder: Path, names: tuple[str, ...] = _WEIGHT_FILES) -> str | None:
    """SHA-256 of the first of these files that the folder has; None if it has none.

    Of weights in several files (shards), one after the other in the order of their names.
    """
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        return None
    if found.suffix != ".json":
        return file_sha256(found)
    shards = set(json.loads(found.read_text("utf-8"))["weight_map"].values())
    return file_sha256(*(folder / name for name in sorted(shards)))


def file_sha256(*paths: Path) -> str:
    """SHA-256 of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
