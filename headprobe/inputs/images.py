"""Images that a model is run on: files, or the embedded sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import needs_pillow
from headprobe.inputs.files import files_of
from headprobe.inputs.quiet import quiet

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def sample_images() -> list[Image]:
    """The embedded sample: drawn shapes, gradients, textures and a face.

    Example:
        >>> {image.size for image in sample_images()}
        {(96, 96)}
    """
    folder = files("headprobe") / "data"
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".png"))
    return [_read(Path(str(folder / name))) for name in names]


def read_images(paths: Iterable[str | Path]) -> list[Image]:
    """Read images as RGB; the way a camera was held is undone.

    Args:
        paths: image files, and folders of such.

    Raises:
        HeadprobeError: if a path is missing, a folder has no image, or a file is none.
    """
    return [_read(path) for path in files_of(paths, _SUFFIXES, "image")]


def image_inputs(images: Sequence[Image], processor: Any, names: frozenset[str]) -> list[Row]:  # noqa: ANN401
    """What the model's forward takes for each image.

    Args:
        images: RGB images of any size.
        processor: the model's own image processor.
        names: keywords that the forward takes.

    Returns:
        A mapping for each image, its tensors with a batch axis of 1.
    """
    rows = []
    with quiet():
        for image in images:
            made = processor(images=image, return_tensors="pt")
            rows.append({name: value for name, value in made.items() if name in names})
    return rows


def hash_of(images: Iterable[Image]) -> str:
    """SHA-256 of the images' sizes and pixels."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.size}".encode() + image.tobytes())
    return digest.hexdigest()


def _read(path: Path) -> Image:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise needs_pillow() from error
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise HeadprobeError(
            f"{str(path)!r} can't be read as an image ({error}): it is damaged, or no image."
        ) from error


Row = dict[str, "Tensor"]
