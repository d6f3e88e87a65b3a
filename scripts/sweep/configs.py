"""Tiny configs of any model type: the defaults, with every size made small by what it is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from scripts.sweep.hints import HINTS
from scripts.sweep.sizes import Sizes

VOCABULARY = 128

# (name, value, sizes, number of layers) -> the small value.
Rule = Callable[[str, int, Sizes, int], int]

# Sizes that are the same whatever the widths: how many there are of a thing, and input sizes.
_COUNTS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"num_nextn_predict_layers|.*predict_layers", 0),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_kv_shared_layers", 1),
    (r"(n_group|topk_group|num_expert_group)", 1),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"n_groups|mamba_n_groups", 1),
    (r"upsample_groups", 32),
    (
        r"(.*_)?(experts?_per_tok(en)?|top_?k_experts|moe_topk|moe_top_?k|moe_k|num_selects|topk|top_k)",
        2,
    ),
    (r"(.*_)?(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts)", 4),
    (r"max_source_positions|max_target_positions|n_ctx|context_length|n_positions", 128),
    (r"max_2d_position_embeddings|max_position_embeddings|max_seq_len(gth)?|max_len", 256),
    (
        r"num_queries|num_query_tokens|num_denoising|two_stage_num_proposals|num_latents|latent_query_num",
        10,
    ),
    (r"num_conv_pos_embeddings", 16),
    (r"codebook_size|num_embeddings|num_codevectors_per_group|image_vocab_size", 64),
    (r"num_frames", 4),
    (
        r"depths|stage_num_blocks|.*_depths|layers_per_stage|blocks_per_stage|num_encoder_blocks_list",
        2,
    ),
)
_LAYERS = re.compile(
    r"(.*_)?(num_)?(hidden_)?layers|(.*_)?n_layers?|(.*_)?depth|.*num_layers|num_.*_layers"
    r"|num_blocks|.*(encoder|decoder|attention|self)_layers|num_.*_blocks|n_blocks"
)
_HEADS = re.compile(r"(.*_)?(num_|n_)?(attention_|attn_)?(n_)?heads?|.*attention_heads|.*n_heads?")
_KV_HEADS = re.compile(r".*(key_value|kv)_heads?|num_kv.*|n_kv.*|.*kv_heads|multi_query_group_num")
_HEAD_WIDTH = re.compile(r".*head_dim|.*head_size|d_kv|.*_dim_head|kv_channels|.*head_width")
_INNER = re.compile(
    r".*intermediate_size|.*(ffn|mlp|ff)_dim|d_ff|.*ffn_hidden_size|n_inner|.*mlp_hidden_size"
)
_WIDTH = re.compile(
    r".*(hidden|embed|embedding|projection|latent|model|output|feature|encoder|decoder|pooler|fpn|mask)"
    r"_?(size|sizes|dim|dims|width)|d_model|n_embd|.*_?d_model|width|dim|.*channels|.*embed_dim|.*_rank"
    r"|hidden_dim|.*filters|conv_dim|.*_dim|.*_size|embed_dim.*|.*_sizes|.*dims"
)
# Numbers that look like widths and are none.
_KEPT = re.compile(
    r".*(kernel|patch|window|stride|merge|chunk|crop|block|grid|pool|cache|codebook|token|tile|"
    r"downsample|upsampl|vocab|position|conv_size|batch|tubelet|state_size|num_channels|image"
    r"|feat_sizes|feature_sizes|input_size|hop|fft|win_|sampling|audio_channels|shift|step|context_size).*"
    r"|in_chans|in_channels|n_mels|num_mel_bins|type_vocab_size|feature_size|channels|rotary_pct|scale"
)
_IDS = re.compile(r".*(_token_index|_idx|_ids?|_index)")
_LAYER_INDEX = re.compile(
    r".*(layer_ids?|layer_idx|indexes|indices|index_list|attn_layers|_layer_id|layers_idx|insert_layer_id|mamba_layers"
    r"|attention_blocks|attn_layer_indices|mlp_only_layers|vision_feature_layer|full_attention_layers)"
)


_OWNERS = {
    "encoder_num_key_value_heads": "encoder_num_attention_heads",
    "decoder_num_key_value_heads": "decoder_num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}

# What is worked out again from the rest, or names a thing that is no longer there.
_DROPPED = ("transformers_version", "architectures", "id2label", "label2id", "stage_names")


def tiny(config_class: type[PreTrainedConfig], sizes: Sizes) -> PreTrainedConfig:
    """The default config of a type, made small."""
    full = config_class().to_dict()
    small = _small(full, sizes)
    return config_class(**_merged(small, HINTS.get(config_class.model_type, {})))


def _merged(config: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    """A config with what a type needs to be told."""
    parts = {
        name: _merged(config.get(name) or {}, hint) if isinstance(hint, dict) else hint
        for name, hint in hints.items()
    }
    return config | parts


def _small(config: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """A config, or a part of one, made small; its parts too."""
    if not all(isinstance(name, str) for name in config):  # a table, not settings
        return config
    count, layers = _kept_layers(config)
    result: dict[str, Any] = {}
    for name, value in config.items():
        if name in _DROPPED:
            continue
        if name in ("out_features", "out_indices"):
            result[name] = value
            continue
        if name == "per_layer_config" and value:
            by_layer = {int(layer): change for layer, change in value.items()}
            result[name] = {
                place: _small(by_layer[layer], sizes)
                for place, layer in enumerate(layers)
                if layer in by_layer
            }
        elif isinstance(value, dict):
            result[name] = _rope(value, sizes) if "rope" in name else _small(value, sizes)
        elif isinstance(value, list | tuple):
            result[name] = _list(name, value, sizes, (count, layers))
        elif isinstance(value, int) and not isinstance(value, bool):
            result[name] = _number(name, value, sizes, len(layers))
        else:
            result[name] = value
    return result | _stages(config, len(layers)) | _shared_heads(config, result)


def _stages(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Which layers a backbone gives out: the last ones, as many as before."""
    given = config.get("out_indices") or config.get("out_features")
    if not given or not _first_number(config, "num_hidden_layers") or config.get("depths"):
        return {}
    last = list(range(layers + 1 - len(given), layers + 1))
    return {"out_features": None, "out_indices": last if len(given) > 1 else None}


def _shared_heads(config: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """As many key heads as heads, where that was so."""
    changed = {}
    for name, value in config.items():
        owner = _OWNERS.get(name) or "num_attention_heads"
        if _KV_HEADS.fullmatch(name) and value is not None and value == config.get(owner):
            changed[name] = small[owner]
    return changed


def _list(
    name: str,
    value: Any,  # noqa: ANN401
    sizes: Sizes,
    kept: tuple[int, list[int]],
) -> Any:  # noqa: ANN401
    """A list: entries of layers that are left out go, the others get small."""
    count, layers = kept
    if _LAYER_INDEX.fullmatch(name):
        return _indices(value, len(layers))
    if count and len(value) == count and (count > 4 or isinstance(value[0], str)):
        value = type(value)(value[i] for i in layers)
    return type(value)(
        _list(name, entry, sizes, (0, []))
        if isinstance(entry, list | tuple)
        else _small(entry, sizes)
        if isinstance(entry, dict)
        else _number(name, entry, sizes, 0)
        if isinstance(entry, int) and not isinstance(entry, bool)
        else entry
        for entry in value
    )


def _number(name: str, value: int, sizes: Sizes, layers: int) -> int:
    """A setting made small, by what its name says that it is; the first that fits decides."""
    for pattern, small in _RULES:
        if pattern.fullmatch(name):
            return small(name, value, sizes, layers)
    return value


def _id(name: str, value: int, sizes: Sizes, layers: int) -> int:
    """A token id within the vocabulary; another for each name, by chance."""
    return value if value < VOCABULARY else 100 + sum(map(ord, name)) % (VOCABULARY - 100)


def _layer(name: str, value: int, sizes: Sizes, layers: int) -> int:
    return max(-layers, min(value, layers - 1)) if layers else value


def _image(name: str, value: int, sizes: Sizes, layers: int) -> int:
    return value if sizes.image is None else min(value, sizes.image)


def _at_most(count: int) -> Rule:
    return lambda name, value, sizes, layers: min(value, count)


def _kept(name: str, value: int, sizes: Sizes, layers: int) -> int:
    return value


def _kept_layers(config: dict[str, Any]) -> tuple[int, list[int]]:
    """How many layers there are, and which to keep: at least two, and one of each kind."""
    count = _first_number(config, "num_hidden_layers", "n_layer", "num_layers", "depth", "n_layers")
    if not count:
        return 0, [0, 1]
    kept = set(range(min(count, 2)))
    backbone = config.get("out_indices") or config.get("out_features") or ()
    kept |= set(range(min(len(backbone), count)))
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = config.get(name) or []
        if len(kinds) == count:
            kept |= {list(kinds).index(kind) for kind in set(kinds)}
    return count, sorted(kept)


def _first_number(config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int):
            return value
    return 0


def _indices(value: Any, layers: int) -> Any:  # noqa: ANN401
    """Indices of layers that are still there."""
    kept = {max(-layers, min(i, layers - 1)) if isinstance(i, int) else i for i in value}
    return type(value)(sorted(kept))


def _rope(value: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Rotary embeddings: the shares of the axes shrink with the heads."""
    result: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, dict):
            result[name] = _rope(entry, sizes)
        elif "section" in name and isinstance(entry, list | tuple):
            share = 2 * sum(entry)
            factor = share // sizes.head_width(share) if share else 1
            small = [max(1, number // factor) for number in entry]
            small[0] += sizes.head_width(share) // 2 - sum(small)
            result[name] = small
        else:
            result[name] = entry
    return result


_RULES: tuple[tuple[re.Pattern[str], Rule], ...] = (
    (_IDS, _id),
    (_LAYER_INDEX, _layer),
    (re.compile(r"(.*_)?image_size|img_size|canvas_size"), _image),
    *((re.compile(pattern), _at_most(count)) for pattern, count in _COUNTS),
    (re.compile("num_feat_extract_layers|num_encoder_blocks"), _kept),
    (_LAYERS, lambda name, value, sizes, layers: min(value, max(2, layers))),
    (_KV_HEADS, lambda name, value, sizes, layers: sizes.kv_heads(value)),
    (_HEAD_WIDTH, lambda name, value, sizes, layers: sizes.head_width(value)),
    (_HEADS, lambda name, value, sizes, layers: sizes.heads(value)),
    (_INNER, lambda name, value, sizes, layers: sizes.inner(value)),
    (_KEPT, _kept),
    (_WIDTH, lambda name, value, sizes, layers: sizes.width(value)),
)
