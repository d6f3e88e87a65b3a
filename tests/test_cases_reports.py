"""Public reports of pages that stay blank and of tokens that nobody can read."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from headprobe import from_attentions, write_report
from headprobe.inputs import batch_texts, load_model


def test_the_page_needs_no_server_and_no_network(tmp_path):
    """The page stayed blank behind a firewall, and could not be saved without a notebook.

    https://github.com/jessevig/bertviz/issues/8
    https://github.com/jessevig/bertviz/issues/41
    https://github.com/jessevig/bertviz/issues/63
    https://github.com/jessevig/bertviz/issues/90
    https://github.com/jessevig/bertviz/issues/99
    """
    write_report(from_attentions([torch.rand(2, 4, 9, 9).softmax(dim=-1)] * 2), tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert not re.findall(r"<script[^>]*\ssrc=|<link[^>]*\shref=|@import|\bfetch\(", page)
    assert "require(" not in page


@pytest.fixture
def bytewise(tmp_path):
    """A model whose tokens are bytes, and characters that are put together from bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ï", "¼"), ("ï¼", "Į"), ("Ġ", ","), ("Ã", "©")]
    ids = {token: i for i, token in enumerate([*alphabet, *map("".join, merges), "<end>"])}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = GPT2Config(vocab_size=len(ids), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(tmp_path)
    return load_model(str(tmp_path))


def test_tokens_of_bytes_are_read_as_characters(bytewise):
    """Tokens of bytes were shown as they are stored, so that no accent or line could be read.

    https://github.com/callummcdougall/sae_vis/issues/55
    https://github.com/huggingface/tokenizers/issues/1470
    """
    made = batch_texts(["é，é , 你好。\na!"], bytewise)
    found = made.token_classes["punctuation"]
    # The bytes of 。 are tokens by themselves: none of them is a character.
    assert {bytewise.tokenizer.decode([token]) for token in found} == {"，", " ,", "!"}
    stored = set(bytewise.tokenizer.convert_ids_to_tokens(sorted(found)))
    assert stored == {"ï¼Į", "Ġ,", "!"}
