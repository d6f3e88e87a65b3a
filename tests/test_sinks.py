"""Attention that goes to no token: learned sinks, learned keys, a key of zeros."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headprobe
from headprobe.statistics import Entropy, EntropyNormalized, Missing, Rows
from tests.models import PADDING, Cross
from tests.test_capture import at_all_rows, run, whole

MASKS = {
    "none": {},
    "bool": {"attn_mask": torch.ones(5, 9, dtype=torch.bool).triu(3)},
    "float": {"attn_mask": torch.randn(5, 9, generator=torch.Generator().manual_seed(0))},
    "per_head": {"attn_mask": torch.randn(8, 5, 9, generator=torch.Generator().manual_seed(0))},
    "padding": {"key_padding_mask": PADDING},
}


class Sinks(nn.Module):
    """A learned score beside those of the keys, whose column is dropped after the softmax."""

    def __init__(self, *, first=False, dropout=0.0):
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)
        self.sinks = nn.Parameter(torch.tensor([0.0, 1.0, 3.0, -2.0]))
        self.first, self.dropout = first, dropout

    def forward(self, x):
        q, k, v = (
            side.unflatten(-1, (4, 8)).transpose(1, 2) for side in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(2, 3) * 8**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        sinks = self.sinks.view(1, 4, 1, 1).expand(len(x), 4, x.shape[1], 1)
        both = torch.cat([sinks, scores] if self.first else [scores, sinks], dim=-1)
        weights = (both - both.amax(-1, keepdim=True)).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        weights = weights[..., 1:] if self.first else weights[..., :-1]
        self.shown = weights
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "options",
    [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
)
@pytest.mark.parametrize("widths", [{}, {"kdim": 24, "vdim": 24}])
def test_learned_and_zero_keys_of_multihead_attention(masks, options, widths):
    model = Cross(batch_first=True, **options, **widths).eval()
    inputs = {"query": torch.randn(2, 5, 32), "key": torch.randn(2, 9, widths.get("kdim", 32))}
    _, (call,), _ = run(model, {**inputs, **masks})
    _, expected = model.attn(
        inputs["query"], inputs["key"], inputs["key"], average_attn_weights=False, **masks
    )
    block = call.at(torch.arange(5).expand(2, -1))
    assert call.keys == 9
    assert call.extra_keys == len(options)
    assert call.sink
    torch.testing.assert_close(torch.cat([block.weights, block.extra], dim=-1), expected)
    assert block.visible.shape[-1] == 9
    assert call.reconstruction_error(block) < 1e-6


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_column_of_a_learned_sink_is_no_key(first, training):
    model = Sinks(first=first, dropout=0.5).train(training)
    x = torch.randn(2, 7, 32)
    _, (call,), _ = run(model, {"x": x})
    with torch.no_grad():
        model.eval()(x)
    torch.testing.assert_close(whole(call), model.shown)
    assert call.sink
    assert torch.equal(at_all_rows(call).visible[0, 0], torch.ones(7, 7, dtype=torch.bool).tril())


def test_the_mass_on_no_key_is_a_figure_of_its_own():
    model = Sinks().eval()
    x = torch.randn(3, 20, 32)
    result = headprobe.profile(model, [{"x": x}])
    model(x)
    expected = (1 - model.shown.sum(-1)).mean(dim=(0, 2))
    heads = result.heads()
    assert heads["missing"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert heads["first"].tolist() == pytest.approx(
        model.shown[..., 0].mean(dim=(0, 2)).tolist(), abs=1e-6
    )


def test_heads_that_attend_to_no_key_are_alike_and_those_that_differ_in_it_are_not():
    model = Sinks().eval()
    with torch.no_grad():
        model.qkv.weight[:32] = 0  # uniform over what is seen: only the sinks tell heads apart
        model.qkv.bias[:32] = 0
        model.sinks.copy_(torch.tensor([30.0, 30.0, -30.0, -30.0]))
    pairs = headprobe.profile(model, [{"x": torch.randn(2, 20, 32)}]).pairs()
    similarity = pairs.set_index(["head_a", "head_b"])["js_similarity"]
    assert similarity[0, 1] == pytest.approx(1, abs=1e-6)
    assert similarity[2, 3] == pytest.approx(1, abs=1e-6)
    assert similarity[0, 2] == pytest.approx(0, abs=1e-6)


def test_layers_whose_rows_sum_to_1_have_no_such_figure():
    model = Cross(batch_first=True).eval()
    inputs = {"query": torch.randn(2, 5, 32), "key": torch.randn(2, 9, 32)}
    assert headprobe.profile(model, [inputs]).heads()["missing"].isna().all()


def test_entropy_counts_the_sink_as_one_more_outcome():
    rows = Rows(
        weights=torch.full((1, 1, 1, 4), 0.2),  # a fifth goes to no key
        positions=torch.tensor([0]),
        query_valid=torch.ones(1, 1, dtype=torch.bool),
        key_valid=torch.ones(1, 4, dtype=torch.bool),
        visible=torch.ones(1, 1, 1, 4, dtype=torch.bool),
        sink=True,
    )
    assert Missing.of(rows).value().item() == pytest.approx(0.2)
    assert Entropy.of(rows).value().item() == pytest.approx(math.log(5))
    assert EntropyNormalized.of(rows).value().item() == pytest.approx(1.0)


def test_gates_reach_learned_keys_too():
    model = Cross(batch_first=True, add_bias_kv=True).eval()
    inputs = {"query": torch.randn(2, 5, 32), "key": torch.randn(2, 9, 32)}
    gated, _, _ = run(model, inputs, gates={"attn": torch.tensor([1.0, 0.0, 1.0, 1.0])})
    with torch.no_grad():
        model.attn.out_proj.weight[:, 8:16] = 0
        expected = model(**inputs)
    torch.testing.assert_close(gated[0], expected[0])
