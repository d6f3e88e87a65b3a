"""The weights of a model: into which class, and whether they are all there."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explaining, needs_code, needs_extra
from headprobe.inputs.places import Place
from headprobe.inputs.quiet import silent

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_weights(
    place: Place,
    config: PretrainedConfig,
    dtype: str,
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The model of that configuration with the weights that lie there.

    Args:
        place: where they lie.
        config: the model's configuration.
        dtype: as for `load_model`.
        device_map: as for `load_model`; None loads the model on the CPU.

    Raises:
        HeadprobeError: if they can't be read, don't belong to the configuration, or lack some that
            attention depends on.
    """
    with ExitStack() as on_disk:
        spread = {} if device_map is None else _spread(device_map, on_disk)
        with explaining(place.label, "the weights"), silent(place.gguf is not None):
            model, loading = _model_class(place, config).from_pretrained(
                place.address,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                # Its error would name no weight; the one below does.
                ignore_mismatched_sizes=True,
                **spread,
                **place.options,
            )
        # What was put on the disk is deleted with the model, which reads it when it runs.
        weakref.finalize(model, on_disk.pop_all().close)
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise HeadprobeError(
            f"weight {key} of {place.label!r} has shape {list(stored)}, its config.json asks for "
            f"{list(expected)}: the two files don't belong together."
        )
    missing = sorted(set(loading["missing_keys"]) & _attention_weights(model))
    if missing:
        raise HeadprobeError(
            f"{place.label!r} lacks {len(missing)} weights of {type(model).__name__} "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}), so its attention would "
            "be random: do the weights belong to this config.json?"
        )
    return model


def _spread(device_map: str | dict[str, Any], on_disk: ExitStack) -> dict[str, Any]:
    """Keywords that spread a model over devices, and a folder for what they have no room for."""
    needs_extra(["accelerate"], "device-map", "a device map")
    folder = on_disk.enter_context(TemporaryDirectory(prefix="headprobe-"))
    return {"device_map": device_map, "offload_folder": folder}


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
    chosen = [*known, *trusted.values(), _default_class(place, config)][0]
    model_class: type[PreTrainedModel] = getattr(transformers, chosen)
    return model_class


def _default_class(place: Place, config: PretrainedConfig) -> str:
    """The class for a configuration that names none, as a GGUF file's: it is a language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    is_language_model = place.gguf is not None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return "AutoModelForCausalLM" if is_language_model else "AutoModel"


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
