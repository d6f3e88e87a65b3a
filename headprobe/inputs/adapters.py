"""PEFT adapters: found beside a model, put on their base, and merged into it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explaining

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# What an adapter was trained for, and the class that its base is loaded as.
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder.

    Attributes:
        folder: where it lies.
        base: folder or hub name of the model that it changes.
        base_class: the class to load that as; None for the one that its configuration names.
        sha256: of the adapter's weights.
    """

    folder: Path
    base: str
    base_class: str | None
    sha256: str


def find_adapter(model: str | None, base: str | None) -> Adapter | None:
    """The adapter that a folder holds; None if it holds a model, or is no folder.

    Args:
        model: the folder.
        base: the base model; None for the one that the adapter names.

    Raises:
        HeadprobeError: if the adapter can't be read or names no base, or peft is not installed.
    """
    folder = Path(model or "").expanduser()
    is_adapter = model is not None and (folder / _CONFIG).is_file()
    if not is_adapter or (folder / "config.json").is_file():
        if base is not None:
            raise HeadprobeError(
                f"--base is the model below an adapter, but {model!r} is no adapter: expected a "
                f"folder with {_CONFIG}."
            )
        return None
    if importlib.util.find_spec("peft") is None:
        raise HeadprobeError(
            f'{model!r} is an adapter, which needs peft: run pip install "headprobe[peft]".'
        )
    with explaining(str(folder), "the adapter's configuration"):
        described = json.loads((folder / _CONFIG).read_text("utf-8"))
        named, task = described.get("base_model_name_or_path"), described.get("task_type")
    base = base or named
    if not base:
        raise HeadprobeError(f"the adapter {model!r} names no base model: give it with --base.")
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise HeadprobeError(f"the adapter {model!r} has no weights: expected {_WEIGHTS[0]}.")
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    return Adapter(folder, base, _CLASSES.get(task or ""), sha256)


def merged(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The base with the adapter added to its weights: the same function, as a plain model.

    Raises:
        HeadprobeError: if the adapter doesn't fit the model, or can't become part of its weights.
    """
    from peft import PeftModel

    with explaining(str(adapter.folder), "the adapter"):
        adapted = PeftModel.from_pretrained(model, str(adapter.folder))
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise HeadprobeError(
            f"the adapter {str(adapter.folder)!r} adds tokens or keys instead of changing weights, "
            "so it can't be merged: run headprobe.profile on the PeftModel in Python."
        )
    whole: PreTrainedModel = adapted.merge_and_unload()
    return whole
