"""Sound, as waves or as features of frames, and other series."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scripts.sweep.spec import AUDIO_TOKEN, BATCH, Inputs, Spec, ids
from scripts.sweep.text import padded_text


def sound_features(spec: Spec) -> Iterator[Inputs]:
    """Features of frames, bins first or last, with a text where the model takes one."""
    name = "input_features"
    if name not in spec.parameters:
        return
    bins = spec.integer(
        *("num_mel_bins", "input_feat_per_channel", "input_dim", "n_mels", "feature_size"),
        default=80,
    )
    words = padded_text(spec)
    token = spec.token(AUDIO_TOKEN)
    if token is not None and "input_ids" in words:
        words["input_ids"][:, 1] = token
    if "decoder_input_ids" in spec.parameters:
        words["decoder_input_ids"] = ids(spec, 5)
    positions = min(spec.integer("max_source_positions", default=64), 128)
    for length in dict.fromkeys((2 * positions, 64, 128, 400, spec.integer("max_length"))):
        masks = {
            mask: torch.ones(BATCH, length, dtype=torch.long)
            for mask in ("input_features_mask", "feature_attention_mask")
            if mask in spec.parameters
        }
        for shape in ((BATCH, length, bins), (BATCH, bins, length), (BATCH, 1, length, bins)):
            yield {name: torch.randn(shape), **words, **masks}


def waves(spec: Spec) -> Iterator[Inputs]:
    """Waves, or what some models call so: frames of bins."""
    name = "input_values"
    if name not in spec.parameters:
        return
    extra: Inputs = {}
    if "decoder_input_ids" in spec.parameters:
        extra = {"decoder_input_ids": ids(spec, 5)}
    channels = spec.integer("audio_channels", default=1)
    bins = spec.integer("num_mel_bins", default=80)
    length = spec.integer("max_length", default=128)
    shapes = (
        (BATCH, 4000),
        (BATCH, channels, 4000),
        (BATCH, 1, 8000),
        (BATCH, min(length, 1024), bins),
        (BATCH, 16000),
    )
    for shape in shapes:
        wave = torch.randn(shape)
        if "input_ids" in spec.parameters:
            yield {name: wave, **padded_text(spec)}
        yield {name: wave, **extra}
        if "input_features" in spec.parameters:
            yield {name: wave, "input_features": torch.randn(BATCH, 50, 160)}
        if "decoder_input_values" in spec.parameters:
            yield {name: wave, "decoder_input_values": torch.randn(BATCH, 5, bins)}


def series(spec: Spec) -> Iterator[Inputs]:
    """Numbers over time."""
    if "past_values" not in spec.parameters:
        return
    length = spec.integer("context_length", default=32)
    lags = spec.find("lags_sequence", default=[0])
    past = length + (max(lags) if lags else 0)
    if "past_time_features" in spec.parameters:
        features = spec.integer("num_time_features", default=0)
        ahead = spec.integer("prediction_length", default=4)
        yield {
            "past_values": torch.randn(BATCH, past),
            "past_time_features": torch.randn(BATCH, past, features),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": torch.randn(BATCH, ahead),
            "future_time_features": torch.randn(BATCH, ahead, features),
        }
    channels = spec.integer("num_input_channels", default=1)
    yield {"past_values": torch.randn(BATCH, length, channels)}
    yield {"past_values": torch.randn(BATCH, length)}
