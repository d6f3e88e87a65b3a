"""Tiny models with a tokenizer, saved as a person's own folder would be."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = ["<pad>", "</s>", "<unk>", ".", ",", "the", "cat", "sat", "on", "mat", "dog", "ran"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token per word, and one that ends the text."""
    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def save_bert(folder: Path, **changes: object) -> Path:
    """An encoder whose heads attend to different things: its weights are not near zero."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    names = {"vocab_size": len(WORDS), "num_attention_heads": 4, "pad_token_id": 0}
    config = {**sizes, **names, "max_position_embeddings": 128, "initializer_range": 0.5}
    torch.manual_seed(0)
    return save(BertModel(BertConfig(**{**config, **changes})), folder)


def save_t5(folder: Path) -> Path:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes)
    return save(T5ForConditionalGeneration(config), folder)


def save_mamba(folder: Path) -> Path:
    """A model without attention."""
    config = MambaConfig(
        vocab_size=len(WORDS), hidden_size=16, state_size=4, num_hidden_layers=1, pad_token_id=0
    )
    return save(MambaForCausalLM(config), folder)
