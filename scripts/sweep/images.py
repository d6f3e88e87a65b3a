"""Images, whole or in patches, and videos."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scripts.sweep.spec import BATCH, IMAGE_TOKEN, Inputs, Spec, ids
from scripts.sweep.text import padded_text


def images(spec: Spec) -> Iterator[Inputs]:
    """Images of every size in the config and some others; with an axis of images or frames."""
    name = "pixel_values"
    if name not in spec.parameters:
        return
    for size in image_sizes(spec):
        for channels in dict.fromkeys((channels_of(spec), 3)):
            image = torch.randn(BATCH, channels, *size)
            if "decoder_input_ids" in spec.parameters and "input_ids" not in spec.parameters:
                yield {name: image, "decoder_input_ids": ids(spec, 5)}
            yield {name: image}
            yield {name: image[:, None]}
            frames = spec.integer("num_frames", default=2)
            yield {name: torch.randn(BATCH, frames, channels, *size)}
    yield from _patches(spec)


def channels_of(spec: Spec) -> int:
    """How many colours an image has."""
    return spec.integer("num_channels", "in_channels", "in_chans", "channels", default=3)


def image_sizes(spec: Spec) -> list[tuple[int, int]]:
    """Height and width, those of the config first."""
    sizes: list[tuple[int, int]] = []
    for part in spec.parts[::-1]:
        value = getattr(part, "image_size", None)
        if isinstance(value, int):
            sizes.append((value, value))
        elif isinstance(value, list | tuple) and len(value) == 2:
            sizes.append((value[0], value[1]))
    return list(dict.fromkeys((*sizes, (32, 32), (64, 64), (128, 128), (224, 224))))


def _patches(spec: Spec) -> Iterator[Inputs]:
    """Images cut into patches beforehand, with the number of patches each way."""
    name, patch = "pixel_values", spec.integer("patch_size", default=14)
    frames = spec.find("temporal_patch_size", default=1)
    side = 2 * int(spec.find("spatial_merge_size", "merge_size", default=2) or 2)
    grid = torch.tensor([[1, side, side]] * BATCH)
    count = BATCH * side * side
    flat = torch.randn(count, channels_of(spec) * int(frames) * patch * patch)
    for grids in ("image_grid_thw", "grid_thw"):
        if grids in spec.parameters:
            yield {name: flat, grids: grid}
    yield {name: torch.randn(count, channels_of(spec), patch, patch), "image_grid_thw": grid}
    if "pixel_attention_mask" in spec.parameters:  # a patch for each position, some are padding
        shape = torch.tensor([[side, side]] * BATCH)
        mask = torch.ones(BATCH, side * side, dtype=torch.long)
        yield {
            name: torch.randn(BATCH, side * side, channels_of(spec) * patch * patch),
            "pixel_attention_mask": mask,
            "spatial_shapes": shape,
        }


def videos(spec: Spec) -> Iterator[Inputs]:
    """Videos, where the forward can't do without."""
    frames = spec.integer("num_frames", "frames_per_clip", default=4)
    for name in ("pixel_values_videos", "pixel_values"):
        if name not in spec.required:
            continue
        for size in image_sizes(spec):
            yield {name: torch.randn(BATCH, frames, channels_of(spec), *size)}


def images_and_text(spec: Spec) -> Iterator[Inputs]:
    """Images, and a text with their place in it."""
    if "input_ids" not in spec.parameters or "pixel_values" not in spec.parameters:
        return
    token = spec.token(IMAGE_TOKEN)
    for image in images(spec):
        words = padded_text(spec)
        if token is not None:
            words["input_ids"][:, 1] = token
        yield {**image, **words}


def patch_rows(spec: Spec) -> Iterator[Inputs]:
    """Vision towers that take all images' patches in one row."""
    if "hidden_states" not in spec.required:
        return
    patch = spec.find("patch_size", default=14)
    patch = patch if isinstance(patch, int) else patch[0]
    frames = spec.find("temporal_patch_size", default=1)
    side = 2 * int(spec.find("spatial_merge_size", default=2))
    rows = BATCH * side * side
    grid = torch.tensor([[1, side, side]] * BATCH)
    for width in (channels_of(spec) * int(frames) * patch**2, spec.find("hidden_size", default=32)):
        yield {"hidden_states": torch.randn(rows, int(width)), "grid_thw": grid}
