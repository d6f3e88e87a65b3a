"""Adapters: a few trained weights beside a base model, merged into it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explaining, first_sentence, needs_extra
from headprobe.inputs.hashes import ADAPTER_WEIGHTS, file_sha256
from headprobe.inputs.places import ADAPTER, Place, locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 3


def is_adapter(place: Place) -> bool:
    """Whether an adapter lies there; where there is a config.json too, it is the base model's."""
    return place.gguf is None and place.fetch(ADAPTER) is not None


def base_of(adapter: Place, base: str | None) -> Place:
    """Where the base model of an adapter lies.

    Args:
        adapter: where the adapter lies.
        base: a folder or hub name instead of the one that the adapter was trained on.

    Raises:
        HeadprobeError: if the adapter names no base, or the base can't be found.
    """
    needs_extra(["peft"], "peft", "an adapter")
    told = base or _read(adapter).get("base_model_name_or_path")
    if not told:
        raise HeadprobeError(f"adapter {adapter.label!r} names no base model: name it by --base.")
    try:
        return locate(told, trusted=adapter.trusted)
    except HeadprobeError as error:
        raise HeadprobeError(
            f"adapter {adapter.label!r} needs its base model, which --base may name: {error}"
        ) from error


def merged(model: PreTrainedModel, adapter: Place) -> PreTrainedModel:
    """The base model with the adapter added to its weights; the model that was given is changed.

    Raises:
        HeadprobeError: if the adapter doesn't fit, or is of a kind that isn't part of the weights.
    """
    from peft import PeftConfig, PeftModel

    options = {"local_files_only": adapter.cached_only, "revision": adapter.revision}
    with explaining(adapter.label, "the adapter"):
        config = PeftConfig.from_pretrained(adapter.address, **options)
    if config.is_prompt_learning:
        raise HeadprobeError(
            f"adapter {adapter.label!r} ({config.peft_type.value}) adds positions that are no "
            "tokens and changes no weight, so it can't be merged: its heads can't be shown."
        )
    if all(adapter.fetch(name) is None for name in ADAPTER_WEIGHTS):
        raise HeadprobeError(f"adapter {adapter.label!r} has no {' or '.join(ADAPTER_WEIGHTS)}.")
    with explaining(adapter.label, "the adapter"):
        config.inference_mode = True
        both = PeftModel(model, config)
        loaded = both.load_adapter(
            adapter.address, "default", torch_device=str(model.device), **options
        )
        foreign = [key for key in loaded.unexpected_keys if not _is_absent_head(key, both, config)]
        _refuse_misfit(adapter, foreign, loaded.missing_keys)
    try:
        result: PreTrainedModel = both.merge_and_unload(safe_merge=True)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise HeadprobeError(
            f"adapter {adapter.label!r} can't be merged into its base model "
            f"({first_sentence(error)}): give the PeftModel itself to headprobe.profile."
        ) from error
    return result


def described(adapter: Place, base: Place) -> dict[str, dict[str, Any]]:
    """What a merged model was made of, for the summary of a run."""
    weights = next((path for name in ADAPTER_WEIGHTS if (path := adapter.file(name))), None)
    return {
        "adapter": {
            "name": adapter.name,
            "kind": _read(adapter).get("peft_type"),
            "merged": True,
            "revision": adapter.revision,
            "weights_sha256": file_sha256(weights) if weights else None,
        },
        "base": {
            "name": base.name,
            "revision": base.revision,
            "weights_sha256": base.weights_sha256,
        },
    }


def _read(adapter: Place) -> dict[str, Any]:
    path = adapter.fetch(ADAPTER)
    try:
        read = json.loads(path.read_text("utf-8")) if path else None
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise HeadprobeError(f"the {ADAPTER} of {adapter.label!r} is not JSON: fetch it again.")
    return read


def _is_absent_head(key: str, model: Any, config: Any) -> bool:  # noqa: ANN401
    """Whether a weight is of a trained head that the base has no place for; no map needs it."""
    names = key.split(".")
    heads = set(config.modules_to_save or []) & set(names)
    there = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    return bool(heads) and not heads & there


def _refuse_misfit(adapter: Place, foreign: list[str], missing: list[str]) -> None:
    if foreign or missing:
        first = ", ".join((foreign or missing)[:_SHOWN])
        raise HeadprobeError(
            f"adapter {adapter.label!r} does not fit its base model: {len(foreign)} of its weights "
            f"have no place there and {len(missing)} are missing ({first}): name the model that it "
            "was trained on by --base."
        )
