"""What single model types need to be told, because their defaults are no model that runs."""

from typing import Any

Hint = dict[str, Any]

_SERIES = {"prediction_length": 4, "context_length": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_TEXT_ROPE = {"text_config": {"rope_parameters": _ROPE}}
_HEADS = {"head_dim": 8}
_GLOBAL = {"global_attention_blocks": [4]}
_FEATURES = {"backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]}
_TOP = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def _each(kinds: list[str], hint: Hint) -> dict[str, Hint]:
    return dict.fromkeys(kinds, hint)


# Model type -> settings, in its parts too.
HINTS: dict[str, Hint] = {
    **_each(["autoformer", "informer", "time_series_transformer"], _SERIES),
    **_each(["hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"], _HEADS),
    **_each(["blip-2", "instructblip", "instructblipvideo"], {"image_token_index": 101}),
    **_each(["sam2", "sam2_video"], {"vision_config": {"backbone_config": _GLOBAL, **_FEATURES}}),
    **_each(["glm4v_text", "glm_image_text"], {"rope_parameters": _ROPE}),
    **_each(["glm4v", "glm46v", "glmga", "glm_image"], _TEXT_ROPE),
    **_each(["sam", "sam_hq"], {"prompt_encoder_config": {"image_embedding_size": 2}}),
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6, "IMGIMGB": 7}},
    "cohere_compass": {"text_config": _ROPES},
    "cohere_compass_text": _ROPES,
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], **_TOP}},
    "deepseek_v2": _TOP,
    "diffusion_gemma": {"text_config": _EXPERTS},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "esm": {"vocab_size": 33},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE, "head_dim": 16}},
    "glm4v_moe_text": {"rope_parameters": _ROPE, "head_dim": 16},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "glm5_next_text": {"index_topk": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_vl": {"text_config": _HEADS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sam2_hiera_det_model": _GLOBAL,
    "sam2_vision_model": {"backbone_config": _GLOBAL},
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "seggpt": {"merge_index": 0, "intermediate_hidden_state_indices": [0, 0, 1, 1]},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        **{"mamba_headdim": 16, "attention_hidden_size": 64},
        **{"attention_head_dim": 16, "kv_channels": 8},
    },
}
