"""Tiny models that see and hear, saved with their processors as a person's own folder would be."""

from pathlib import Path

import torch
from transformers import (
    BeitConfig,
    BeitModel,
    CLIPConfig,
    CLIPModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    HubertConfig,
    HubertModel,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.tiny import WORDS, word_tokenizer

PIXELS = 32
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_PICTURE = {"image_size": PIXELS, "patch_size": 8}
_WIDE = {"initializer_range": 0.3}
_EAR = {
    **_SMALL,
    "intermediate_size": 24,
    "conv_dim": [8] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_WORDS = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


def vit(**changes):
    return ViTModel(ViTConfig(**_SMALL, **_PICTURE, **_WIDE, intermediate_size=24, **changes))


def dinov2_with_registers(**changes):
    config = {**_SMALL, **_PICTURE, **_WIDE, "num_register_tokens": 3, **changes}
    return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**config))


def beit(**changes):
    config = {**_SMALL, **_PICTURE, **_WIDE, "intermediate_size": 24, **changes}
    return BeitModel(BeitConfig(**config, use_relative_position_bias=True))


def swin(window=4, **changes):
    config = {"image_size": PIXELS, "patch_size": 4, "embed_dim": 8, "window_size": window}
    config |= {"depths": [2, 2], "num_heads": [2, 4], **_WIDE}
    return SwinModel(SwinConfig(**config, **changes))


def clip(**changes):
    part = {**_SMALL, "num_hidden_layers": 1, "intermediate_size": 24}
    return CLIPModel(
        CLIPConfig(
            text_config={**part, **_WORDS, "max_position_embeddings": 16},
            vision_config={**part, **_PICTURE},
            projection_dim=8,
            **changes,
        )
    )


def whisper(**changes):
    config = {"d_model": 16, "max_source_positions": 50, "num_mel_bins": 8, "init_std": 0.3}
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    config |= {**_WORDS, "decoder_start_token_id": 1, "max_target_positions": 16, **changes}
    return WhisperModel(WhisperConfig(**config))


def wav2vec2(**changes):
    return Wav2Vec2Model(Wav2Vec2Config(**_EAR, **_WIDE, **changes))


def hubert(**changes):
    options = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
    return HubertModel(HubertConfig(**_EAR, **_WIDE, **options, **changes))


SEEING = {f.__name__: f for f in (vit, dinov2_with_registers, beit, swin, clip)}
HEARING = {f.__name__: f for f in (whisper, wav2vec2, hubert)}


def save_media(name: str, folder: Path, **changes: object) -> Path:
    """A model of these with random weights, its processor and, if it reads text, a tokenizer."""
    torch.manual_seed(0)
    model: PreTrainedModel = (SEEING | HEARING)[name](**changes)
    model.save_pretrained(folder)
    if name in SEEING:
        ViTImageProcessorPil(size={"height": PIXELS, "width": PIXELS}).save_pretrained(folder)
    elif name == "whisper":
        # One second, 100 frames of 10 ms; the model makes 50 positions of them.
        WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    else:
        Wav2Vec2FeatureExtractor().save_pretrained(folder)
    if name in ("clip", "whisper"):
        word_tokenizer().save_pretrained(folder)
    return folder
