"""What a model reads (text, images, sound), and what prepares images and sound for it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from headprobe.inputs.failures import explaining, needs_pillow

if TYPE_CHECKING:
    from torch import nn

    from headprobe.inputs.places import Place

TEXT, IMAGES, SOUND = "text", "images", "sound"

_SOUND_INPUTS = frozenset(("input_values", "input_features"))


def keywords(model: nn.Module) -> frozenset[str]:
    """The keywords of a model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def reads(model: nn.Module) -> frozenset[str]:
    """Which of text, images and sound can be given to a model by themselves.

    Images and sound that take the place of tokens in a text can't: the text has to be made for
    them.
    """
    names = keywords(model)
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    in_texts = any("image_token" in name or "audio_token" in name for name in settings)
    media = set()
    if "pixel_values" in names and not in_texts:
        media.add(IMAGES)
    if names & _SOUND_INPUTS and not in_texts:
        media.add(SOUND)
    return frozenset(media | ({TEXT} if "input_ids" in names or not media else set()))


def has_towers(model: nn.Module) -> bool:
    """Whether a model has a part for text and another one for images or sound, and needs both."""
    config = getattr(model, "config", None)
    parts = ("vision_config", "audio_config")
    return hasattr(config, "text_config") and any(hasattr(config, part) for part in parts)


def load_processor(place: Place, kind: str) -> Any:  # noqa: ANN401
    """The image processor or the feature extractor that comes with a model.

    Raises:
        HeadprobeError: if there is none, or it can't be loaded.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    if kind == IMAGES:
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise needs_pillow() from error
        with explaining(place.address, "the image processor (preprocessor_config.json)"):
            # The same pixels with and without torchvision.
            return AutoImageProcessor.from_pretrained(place.address, backend="pil", **place.options)
    with explaining(place.address, "the feature extractor (preprocessor_config.json)"):
        return AutoFeatureExtractor.from_pretrained(place.address, **place.options)
