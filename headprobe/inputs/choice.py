"""What a model is run on: what a person named, else the embedded samples of what it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headprobe.errors import HeadprobeError
from headprobe.inputs import audio, images
from headprobe.inputs.batches import TextBatches, batch_texts
from headprobe.inputs.media import Media, batch_media
from headprobe.inputs.models import Source
from headprobe.inputs.processors import IMAGES, SOUND, TEXT, has_towers, keywords
from headprobe.inputs.texts import sample_texts, short_texts

if TYPE_CHECKING:
    from PIL.Image import Image

_SMALL = 2
"""Images or sounds of a small batch."""


@dataclass(frozen=True)
class Choice:
    """What a person named, read from its files; of what was not named None or nothing.

    Attributes:
        texts: None: the embedded ones, for a model that reads text.
        images: none: the embedded ones, for a model that needs images.
        sounds: none: the embedded ones, for a model that needs sound.
        most: only so many of each; None for all.
        small: one small batch.
    """

    texts: list[str] | None = None
    images: list[Image] = field(default_factory=list)
    sounds: list[audio.Sound] = field(default_factory=list)
    most: int | None = None
    small: bool = False


def batch_inputs(
    source: Source, choice: Choice, *, max_tokens: int = 128, batch_size: int = 16
) -> TextBatches:
    """The batches to run a model on.

    Args:
        source: the model.
        choice: what a person named.
        max_tokens: longer texts are cut here.
        batch_size: texts, images or sounds at a time.

    Raises:
        HeadprobeError: if the model does not take what was named.
    """
    kind = _kind(source, choice)
    texts = _texts(source, choice, kind)
    if kind is None:
        return batch_texts(texts, source, max_tokens=max_tokens, batch_size=batch_size)
    most = _SMALL if choice.small else choice.most
    media = (_images if kind == IMAGES else _sounds)(source, choice, most)
    return batch_media(media, source, texts=texts, max_tokens=max_tokens, batch_size=batch_size)


def _kind(source: Source, choice: Choice) -> str | None:
    """Images, sound, or None: only text."""
    if choice.images and choice.sounds:
        raise HeadprobeError("images and sounds can't be run together: give --images or --audio.")
    if choice.images or choice.sounds:
        return IMAGES if choice.images else SOUND
    if TEXT in source.reads and not has_towers(source.model):
        return None
    return next((kind for kind in (IMAGES, SOUND) if kind in source.reads), None)


def _texts(source: Source, choice: Choice, kind: str | None) -> list[str]:
    has_decoder = kind is not None and "decoder_input_ids" in keywords(source.model)
    if choice.texts is not None:
        if TEXT not in source.reads and not has_decoder:
            raise HeadprobeError(
                f"{source.name!r} takes no text: it reads {' and '.join(sorted(source.reads))}."
            )
        texts = choice.texts
    elif TEXT in source.reads:
        texts = sample_texts()
    else:
        return []
    return short_texts(texts) if choice.small else texts[: choice.most]


def _images(source: Source, choice: Choice, most: int | None) -> Media:
    processor = source.processor(IMAGES)
    chosen = (choice.images or images.sample_images())[:most]
    rows = images.image_inputs(chosen, processor, keywords(source.model))
    return Media("images", rows, {"hash": images.hash_of(chosen)})


def _sounds(source: Source, choice: Choice, most: int | None) -> Media:
    extractor = source.processor(SOUND)
    chosen = (choice.sounds or audio.sample_sounds())[:most]
    rows = audio.sound_inputs(chosen, extractor, source.model, keywords(source.model))
    lasting = round(sum(len(sound.samples) / sound.rate for sound in chosen), 3)
    cut = audio.cut_by(extractor, chosen)
    facts = {"seconds": lasting, "cut": cut, "hash": audio.hash_of(chosen)}
    return Media("sounds", rows, facts, audio.seconds_per_step(rows[0], extractor))
