"""Public reports of padding, masks, NaN and sinks."""

import math

import pytest
import torch
from torch.nn import functional as F

from headprobe import HeadprobeError, diagnose, from_attentions, profile
from tests.cases import heads_of, seen, tiny
from tests.models import Nano, make
from tests.test_capture import whole


def alone(inputs):
    """Each text of a batch by itself, without its padding."""
    mask = inputs["attention_mask"].bool()
    return [
        {"input_ids": ids[None, real]} for ids, real in zip(inputs["input_ids"], mask, strict=True)
    ]


def figures(result):
    return heads_of(result, "entropy", "first", "confidence", "output_norm", "nearest_similarity")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "llama", "albert", "roberta"])
def test_a_padded_text_has_the_maps_of_the_text_alone(kind, attention):
    """Texts of several lengths could not be given together, or padding was attended to.

    https://github.com/TransformerLensOrg/TransformerLens/issues/240
    """
    case = tiny(kind, attention)
    batch = seen(case.model, case.inputs)
    for text, inputs in enumerate(alone(case.inputs)):
        length = inputs["input_ids"].shape[1]
        for call, one in zip(batch, seen(case.model, inputs), strict=True):
            padded = whole(call)[text, :, :length]
            torch.testing.assert_close(padded[..., :length], whole(one)[0], atol=1e-5, rtol=0)
            assert not padded[..., length:].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi", "opt"])
def test_left_padded_texts_are_not_silently_wrong(kind, attention):
    """Padding on the left moved a text's positions, and its maps were of another text.

    https://github.com/TransformerLensOrg/TransformerLens/issues/1609
    """
    case = tiny(kind, attention)
    inputs = {
        "input_ids": case.inputs["input_ids"].roll(3, dims=1),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
    }
    inputs["attention_mask"][1, :3] = 0
    padded = profile(case.model, [inputs])
    torch.testing.assert_close(
        figures(padded), figures(profile(case.model, alone(inputs))), atol=1e-5, rtol=1e-5
    )
    assert padded.tokens == 21


def test_the_first_token_of_a_left_padded_text_is_not_its_first_column():
    """Maps were read one token off, since what stands before the text was not counted.

    https://github.com/zjysteven/VLM-Visualizer/issues/7
    https://github.com/OpenGVLab/VideoChat-Flash/issues/14
    """
    model, inputs = make("llama-sdpa")
    inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    maps = [whole(call) for call in seen(model, inputs)]
    expected = torch.cat(
        [
            torch.cat([weights[0, :, :, 0], weights[1, :, 3:, 3]], dim=1).mean(dim=1)
            for weights in maps
        ]
    )
    found = heads_of(profile(model, [inputs]), "first")[:, 0]
    torch.testing.assert_close(found, expected.double(), atol=1e-5, rtol=0)


def test_a_sink_that_dominates_every_map_is_a_figure_of_its_own():
    """One column, that of the first token, is so bright that nothing else can be seen.

    https://github.com/zjysteven/VLM-Visualizer/issues/15
    """

    def drawn(q, k, v):
        scores = q @ k.mT / 8**0.5
        scores[:, 2, :, 0] += 12
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ v

    result = profile(Nano(attend=drawn), [{"idx": torch.randint(0, 60, (3, 20))}])
    first, sink = heads_of(result, "first", "sink").T
    assert first[2] > 0.99
    assert sink[2] == 1
    assert first[[0, 1, 3]].max() < 0.6
    found = diagnose(result.heads(), result.pairs(), result.layers())
    assert found.flags.query("flag == 'sink'")["head"].tolist() == [2]


MASK = torch.ones(9, 9, dtype=torch.bool).tril(-1)  # the first row sees no key

MASKED = {
    "zeros": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
        "some of its rows are zeros: all of their keys are masked",
    ),
    "nan": (
        lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -torch.inf).softmax(dim=-1) @ v,
        "its weights are not finite: a row whose keys are all masked",
    ),
}


@pytest.mark.parametrize("how", MASKED)
def test_rows_whose_keys_are_all_masked_are_named(how):
    """A row that sees no key is NaN in one kernel and zeros in another.

    https://github.com/pytorch/pytorch/issues/103749
    https://github.com/pytorch/pytorch/pull/190486
    """
    attend, reason = MASKED[how]
    model, inputs = Nano(attend=attend).eval(), {"idx": torch.randint(0, 60, (2, 9))}
    (call,) = seen(model, inputs)
    row = whole(call)[:, :, 0]
    assert bool(row.isnan().all() if how == "nan" else (row == 0).all())
    result = profile(model, [inputs])
    assert result.measured == ()
    assert result.left_out[""].startswith(reason)


def test_padding_that_takes_part_in_attention():
    """The text model of two towers has no padding mask of its own: are its empty places read?

    https://github.com/openai/CLIP/issues/183
    """
    case = tiny("clip_text_model")
    masked = profile(case.model, [case.inputs])
    apart = profile(case.model, alone(case.inputs))
    torch.testing.assert_close(figures(masked), figures(apart), atol=1e-5, rtol=1e-5)
    assert [layer.padding_mass for layer in masked.measured] == [0, 0]
    unmasked = profile(case.model, [{"input_ids": case.inputs["input_ids"]}])
    assert (masked.tokens, unmasked.tokens) == (21, 24)
    assert not torch.allclose(figures(unmasked), figures(apart), atol=1e-3)


ONE_KEY = 150 * torch.eye(9).roll(2, dims=0)  # beyond the reach of float32 for all other keys

POINTED = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(0 * q, k, v, attn_mask=ONE_KEY),
    "eager": lambda q, k, v: (0 * q @ k.mT + ONE_KEY).softmax(dim=-1) @ v,
}


@pytest.mark.parametrize("attention", POINTED)
def test_the_entropy_of_a_row_on_one_key_is_zero_and_not_nan(attention):
    """Entropies were NaN where weights are 0, and where what was given are no probabilities.

    https://github.com/huggingface/transformers/issues/19944
    """
    model, inputs = Nano(attend=POINTED[attention]).eval(), {"idx": torch.randint(0, 60, (2, 9))}
    (call,) = seen(model, inputs)
    assert torch.equal(whole(call), (ONE_KEY > 0).float().expand(2, 4, 9, 9))
    found = heads_of(profile(model, [inputs]), "entropy", "entropy_normalized", "effective_support")
    assert torch.equal(found, torch.tensor([[0.0, 0.0, 1.0]] * 4, dtype=torch.double))


@pytest.mark.parametrize(
    "spoil", [lambda m: 2 * m, lambda m: m - 0.2, lambda m: m.log(), lambda m: m * math.nan]
)
def test_what_is_given_and_no_probabilities_has_no_entropy(spoil):
    """The same script made NaN of whatever it took for weights.

    https://github.com/huggingface/transformers/issues/19944
    """
    with pytest.raises(HeadprobeError):
        from_attentions([spoil(torch.rand(2, 4, 9, 9).softmax(dim=-1))])
