"""The files that a model's weights lie in, and their SHA-256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in the order of peft
_WEIGHT_FILES = (  # in the order in which transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    *ADAPTER_WEIGHTS,
)


def weight_files(folder: Path) -> list[Path]:
    """The weights that are loaded from a folder, of a model or an adapter; of several in order."""
    found = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if found is None or found.suffix != ".json":
        return [found] if found else []
    shards = set(json.loads(found.read_text("utf-8"))["weight_map"].values())
    return [folder / name for name in sorted(shards)]


def file_sha256(*paths: Path) -> str:
    """SHA-256 of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
