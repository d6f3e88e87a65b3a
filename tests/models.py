"""Tiny models, built from configs or by hand: no download, seeded, in eval mode.

`MODELS` maps a name to a function that makes (model, keywords of its forward). A family that
headprobe gets wrong becomes a row here first.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as early_bound

import headprobe

VOCABULARY = 60


def ids(batch=2, length=9, padded=3):
    tokens = torch.randint(1, VOCABULARY, (batch, length))
    mask = torch.ones_like(tokens)
    if padded:
        mask[-1, -padded:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def bert(attention, **config):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = sizes | {"vocab_size": VOCABULARY, "intermediate_size": 37} | config
    return BertModel(BertConfig(attn_implementation=attention, **config)), ids()


def gpt2(attention):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=1,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config), ids()


def llama(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=37,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config), ids()


def t5(attention):
    from transformers import T5Config, T5Model

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        d_ff=37,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    inputs = ids()
    # The same ids on both sides: two sequences all the same.
    return T5Model(config), inputs | {"decoder_input_ids": inputs["input_ids"]}


def bart(attention):
    from transformers import BartConfig, BartModel

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        attn_implementation=attention,
    )
    return BartModel(config), ids() | {"decoder_input_ids": torch.randint(3, VOCABULARY, (2, 5))}


def vit(attention):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=37,
        image_size=8,
        patch_size=4,
        attn_implementation=attention,
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


TRANSFORMERS = {f.__name__: f for f in (bert, gpt2, llama, t5, bart, vit)}


class Nano(nn.Module):
    """A causal block as in small teaching code: fused q, k, v; a hand-written softmax or sdpa."""

    def __init__(self, *, attend):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 32)
        self.c_attn = nn.Linear(32, 96)
        self.c_proj = nn.Linear(32, 32)
        self.attend = attend

    def forward(self, idx):
        x = self.wte(idx)
        q, k, v = (
            side.view(*idx.shape, 4, 8).transpose(1, 2) for side in self.c_attn(x).split(32, dim=-1)
        )
        y = self.attend(q, k, v)
        return x + self.c_proj(y.transpose(1, 2).contiguous().view(*idx.shape, 32))


def by_hand(q, k, v):
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return F.dropout(F.softmax(scores.masked_fill(later, float("-inf")), dim=-1), 0.3, False) @ v


def flash(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def bound_early(q, k, v):
    return early_bound(q, k, v, is_causal=True)


def folded(q, k, v):
    """[batch * heads, queries, keys], with bmm."""
    q, k, v = (side.reshape(-1, *side.shape[2:]) for side in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).div(8**0.5).softmax(-1)
    return torch.bmm(weights, v).view(-1, 4, *q.shape[1:])


def einsum(q, k, v):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def heads_last(q, k, v):
    """[batch, length, heads, dim], as einsum is often written."""
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(dim=-1)
    return torch.einsum("bhqk, bkhd -> bqhd", weights, v).transpose(1, 2)


def any_axes(q, k, v):
    weights = torch.einsum("...id,...jd->...ij", q, k).softmax(dim=-1)
    return torch.einsum("...ij,...jd->...id", weights, v)


class OneHead(nn.Module):
    """One head, one sequence, no axis for either."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.o((self.q(x) @ self.k(x).t()).softmax(dim=-1) @ self.v(x))


class SequenceFirst(nn.Module):
    """[length, batch, width], and batch and heads folded into one axis."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        sides = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (side.reshape(len(x), -1, 8).transpose(0, 1) for side in sides)
        weights = torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1)
        return self.o(torch.bmm(weights, v).transpose(0, 1).reshape(x.shape))


class Windows(nn.Module):
    """[batch, windows, heads, length, dim], with a mask for each window."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, mask):
        q, k, v = (
            side.unflatten(-1, (2, 4)).transpose(-2, -3) for side in self.qkv(x).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Shared(nn.Module):
    """One attention module, called three times in a pass."""

    def __init__(self):
        super().__init__()
        self.block = headprobe.MultiHeadAttention(32, 4)

    def forward(self, x):
        for _ in range(3):
            x = x + self.block(x)
        return x


class Cross(nn.Module):
    """nn.MultiheadAttention from one sequence to another."""

    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, **options)

    def forward(self, query, key, **masks):
        return self.attn(query, key, key, **masks)


def torch_encoder(batch_first=True):
    layer = nn.TransformerEncoderLayer(32, 4, 37, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    src = torch.randn(2, 9, 32) if batch_first else torch.randn(9, 2, 32)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    return model, {"src": src, "src_key_padding_mask": padding}


def torch_transformer():
    model = nn.Transformer(32, 4, 2, 2, 37, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    inputs = {"src": torch.randn(2, 9, 32), "tgt": torch.randn(2, 5, 32)}
    return model, inputs | {"tgt_mask": causal}


def reference(**options):
    model = headprobe.MultiHeadAttention(32, 4, **options)
    return model, {"x": torch.randn(2, 9, 32), "is_causal": True}


def cross(masks=None, **options):
    widths = [options.get(f"{side}dim") or 32 for side in "k"]
    inputs = {"query": torch.randn(2, 5, 32), "key": torch.randn(2, 9, widths[0])}
    return Cross(batch_first=True, **options), inputs | (masks or {})


CAUSAL = torch.ones(5, 9, dtype=torch.bool).triu(1)
PADDING = torch.arange(9).expand(2, 9) > torch.tensor([[8], [5]])
FORBIDDEN = torch.zeros(5, 9, dtype=torch.bool).index_fill(1, torch.tensor([2, 3]), True)

PLAIN = {
    "nano": lambda: (Nano(attend=by_hand), {"idx": ids()["input_ids"]}),
    "nano_flash": lambda: (Nano(attend=flash), {"idx": ids()["input_ids"]}),
    "nano_bound_early": lambda: (Nano(attend=bound_early), {"idx": ids()["input_ids"]}),
    "nano_folded": lambda: (Nano(attend=folded), {"idx": ids()["input_ids"]}),
    "nano_einsum": lambda: (Nano(attend=einsum), {"idx": ids()["input_ids"]}),
    "nano_heads_last": lambda: (Nano(attend=heads_last), {"idx": ids()["input_ids"]}),
    "nano_any_axes": lambda: (Nano(attend=any_axes), {"idx": ids()["input_ids"]}),
    "one_head": lambda: (OneHead(), {"x": torch.randn(9, 8)}),
    "shared": lambda: (Shared(), {"x": torch.randn(2, 9, 32)}),
    "torch_encoder": torch_encoder,
    "torch_transformer": torch_transformer,
    "reference": reference,
    "reference_gqa": lambda: reference(n_kv_heads=2),
    "reference_mqa": lambda: reference(n_kv_heads=1, bias=True),
    "cross": cross,
    "cross_separate": lambda: cross(kdim=24, vdim=24),
    "cross_padded": lambda: cross({"key_padding_mask": PADDING}),
    "cross_masked": lambda: cross({"attn_mask": FORBIDDEN, "key_padding_mask": PADDING}),
    "cross_causal": lambda: cross({"attn_mask": CAUSAL, "is_causal": True}),
    "cross_float_mask": lambda: cross({"attn_mask": torch.randn(5, 9)}),
    "cross_float_and_padded": lambda: cross(
        {"attn_mask": torch.randn(5, 9), "key_padding_mask": PADDING.float() * -1e9}
    ),
    "cross_mask_per_head": lambda: cross({"attn_mask": torch.randn(8, 5, 9)}),
}

MODELS = {
    **{
        f"{name}-{attention}": lambda build=build, attention=attention: build(attention)
        for name, build in TRANSFORMERS.items()
        for attention in ("eager", "sdpa")
    },
    **PLAIN,
}


def make(name):
    """A model of MODELS in eval mode, and its inputs; the same each time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for parameter in model.parameters():  # a trained model's attention is not uniform
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval(), inputs
