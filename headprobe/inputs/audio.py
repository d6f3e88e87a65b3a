"""Sounds that a model is run on: WAV files, or the embedded sample."""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Iterable, Sequence
from importlib.resources import files
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headprobe.errors import HeadprobeError
from headprobe.inputs.files import files_of
from headprobe.inputs.quiet import quiet

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    Row = dict[str, Tensor]
    Samples = np.ndarray[Any, np.dtype[np.float32]]


class Sound(NamedTuple):
    """A sound with one channel.

    Attributes:
        name: where it comes from, for errors.
        samples: from -1 to 1, float32, [samples].
        rate: samples per second.
    """

    name: str
    samples: Samples
    rate: int


def sample_sounds() -> list[Sound]:
    """The embedded sample: tones, a chirp, bursts of noise, and vowels.

    Example:
        >>> {sound.rate for sound in sample_sounds()}
        {16000}
    """
    folder = files("headprobe") / "data"
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".wav"))
    return [_read(Path(str(folder / name))) for name in names]


def read_sounds(paths: Iterable[str | Path]) -> list[Sound]:
    """Read WAV files; channels are averaged.

    Args:
        paths: WAV files, and folders of such.

    Raises:
        HeadprobeError: if a path is missing, a folder has no WAV file, or a file is none or empty.
    """
    return [_read(path) for path in files_of(paths, (".wav",), "WAV file")]


def sound_inputs(
    sounds: Sequence[Sound],
    extractor: Any,  # noqa: ANN401
    model: nn.Module,
    names: frozenset[str],
) -> list[Row]:
    """What the model's forward takes for each sound.

    Args:
        sounds: of any length and rate.
        extractor: the model's own feature extractor.
        model: the model.
        names: keywords that its forward takes.

    Returns:
        A mapping for each sound, its tensors with a batch axis of 1.

    Raises:
        HeadprobeError: if a sound is too short for the model.
    """
    rate = int(extractor.sampling_rate)
    rows = []
    for sound in sounds:
        samples = resampled(sound, rate)
        _check_length(sound, len(samples), model)
        with quiet():
            made = extractor(samples, sampling_rate=rate, return_tensors="pt")
        row = {name: value for name, value in made.items() if name in names}
        if "attention_mask" in row and bool(row["attention_mask"].all()):
            del row["attention_mask"]  # there is no padding to tell
        rows.append(row)
    return rows


def seconds_per_step(row: Row, extractor: Any) -> dict[str, float]:  # noqa: ANN401
    """Name of an input -> seconds per step along its time axis, where the extractor tells."""
    rate = int(extractor.sampling_rate)
    hop = getattr(extractor, "hop_length", None)
    seconds = {}
    for name, value in row.items():
        if value.dim() == 2 and value.is_floating_point():  # [batch, samples]
            seconds[name] = 1 / rate
        elif value.dim() == 3 and isinstance(hop, int):  # [batch, mel, frames]
            seconds[name] = hop / rate
    return seconds


def resampled(sound: Sound, rate: int) -> Samples:
    """The sound's samples at another rate."""
    from scipy.signal import resample_poly

    if sound.rate == rate:
        return sound.samples
    shared = gcd(sound.rate, rate)
    changed = resample_poly(sound.samples, rate // shared, sound.rate // shared)
    return changed.astype("float32")


def cut_by(extractor: Any, sounds: Iterable[Sound]) -> int:  # noqa: ANN401
    """How many sounds are longer than what the extractor keeps."""
    kept = getattr(extractor, "n_samples", None)
    if not isinstance(kept, int):
        return 0
    return sum(len(s.samples) / s.rate > kept / extractor.sampling_rate for s in sounds)


def hash_of(sounds: Iterable[Sound]) -> str:
    """SHA-256 of the sounds' rates and samples."""
    digest = hashlib.sha256()
    for sound in sounds:
        digest.update(f"{sound.rate} {len(sound.samples)} ".encode() + sound.samples.tobytes())
    return digest.hexdigest()


def _read(path: Path) -> Sound:
    import numpy as np
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of chunks that aren't sound
            rate, stored = wavfile.read(path)
    except (OSError, ValueError, EOFError, struct.error) as error:
        raise HeadprobeError(
            f"{str(path)!r} can't be read as a WAV file ({error}): it is damaged, or no WAV file."
        ) from error
    if not stored.size or rate < 1:
        raise HeadprobeError(f"{str(path)!r} has no sound in it: expected at least one sample.")
    kind = stored.dtype
    samples = stored.astype(np.float64)
    if kind == np.uint8:  # the only width without a sign
        samples = (samples - 128) / 128
    elif kind.kind == "i":
        samples /= -float(np.iinfo(kind).min)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if not np.isfinite(samples).all():
        raise HeadprobeError(f"{str(path)!r} has samples that are no numbers: write it again.")
    return Sound(path.name, samples.astype(np.float32), int(rate))


def _check_length(sound: Sound, samples: int, model: nn.Module) -> None:
    frames = getattr(model, "_get_feat_extract_output_lengths", None)
    if frames is None:
        return
    # The models that read samples say themselves how many positions they make of them.
    if int(frames(samples)) < 1:
        raise HeadprobeError(
            f"sound {sound.name!r} has {samples} samples, fewer than one position of this model "
            "covers: give a longer one."
        )
