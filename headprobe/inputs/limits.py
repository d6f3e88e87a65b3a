"""How many tokens a model can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NO_LIMIT = 10**6  # tokenizers without a limit carry a huge number instead


def max_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most tokens that a model can read, special ones included; None if there is no limit."""
    config = model.config.get_text_config()
    names = ["max_position_embeddings"]
    if not hasattr(config, "relative_attention_num_buckets"):
        # Relative positions have no end; old configurations name one nonetheless.
        names += ["n_positions", "max_seq_len", "n_ctx"]
    declared = [getattr(config, name, None) for name in names]
    table = next((n for n in declared if isinstance(n, int) and n > 0), None)
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < _NO_LIMIT else []
    if table:
        limits.append(table - _first_position(model, table))
    return min(limits, default=None)


def word_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """The table of a model's words; None if it has none."""
    from torch import nn

    try:
        words: nn.Module = model.get_input_embeddings()
        return words
    except NotImplementedError:  # a model of several towers: transformers doesn't say whose
        size = getattr(model.config.get_text_config(), "vocab_size", None)
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
        return next((table for table in tables if table.num_embeddings == size), None)


def _first_position(model: PreTrainedModel, table: int) -> int:
    """Positions may start after the padding row of their table, which is shorter by that."""
    from torch import nn

    words = word_embeddings(model)
    for module in model.modules():
        is_positions = isinstance(module, nn.Embedding) and module is not words
        if is_positions and module.num_embeddings == table and module.padding_idx is not None:
            return int(module.padding_idx) + 1
    return 0
