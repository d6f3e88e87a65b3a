"""Public reports of maps that are there and are not those of the model."""

import pytest
import torch

from headprobe import HeadprobeError, from_attentions, profile
from tests.cases import assert_own_maps, read_out, seen, tiny
from tests.models import Nano, by_hand, flash, ids, make
from tests.test_capture import whole


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_the_causal_mask_holds_where_no_mask_is_given(kind, attention):
    """Unpadded, the way that gave maps ran without a causal mask: its maps were of another model.

    https://github.com/huggingface/transformers/pull/30652
    """
    case = tiny(kind, attention)
    case.inputs = {"input_ids": case.inputs["input_ids"]}
    calls = seen(case.model, case.inputs)
    assert len(calls) == 2
    for call in calls:
        assert not whole(call).triu(1).any()
        torch.testing.assert_close(whole(call).sum(dim=-1), torch.ones(2, call.heads, 12))
    assert_own_maps(case, calls, 2)


def test_images_packed_in_one_row_stay_apart_whatever_the_kernel():
    """Vision towers get no mask, or another one, in another kernel, and the scores differ.

    https://github.com/huggingface/transformers/issues/35749
    https://github.com/huggingface/transformers/issues/42271
    """
    for attention in ("sdpa", "eager"):
        case = tiny("qwen2_5_vl_vision", attention)
        rows, grid = case.inputs["hidden_states"], case.inputs["grid_thw"]
        together = seen(case.model, case.inputs)
        half = len(rows) // 2
        alone = [
            seen(case.model, {"hidden_states": part, "grid_thw": grid[:1]})
            for part in (rows[:half], rows[half:])
        ]
        assert [(c.site, c.call) for c in together] == [
            (f"blocks.{layer}.attn", image) for layer in range(2) for image in range(2)
        ]
        for call in together:
            (same,) = (c for c in alone[call.call] if c.site == call.site)
            torch.testing.assert_close(whole(call), whole(same), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_that_overflow_in_half_precision_are_named(attention):
    """In float16 with eager attention a model gave nonsense that bfloat16 did not give.

    https://github.com/open-compass/opencompass/issues/1955
    """

    def scaled(dtype):
        model, inputs = make(f"llama-{attention}")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(300)
                layer.self_attn.k_proj.weight.mul_(300)
        return profile(model.to(dtype), [inputs])

    assert scaled(torch.bfloat16).left_out == {}
    half = scaled(torch.float16)
    if attention == "sdpa":  # its scores are float32 inside
        assert half.left_out == {}
        return
    assert half.measured == ()
    for reason in half.left_out.values():
        assert "an overflow (of float16: use bfloat16 or float32)" in reason


def test_attentions_that_are_scores_are_refused_and_the_weights_are_found():
    """What a model returns as attentions are the scores before the softmax.

    https://github.com/huggingface/transformers/pull/48333
    """
    case = tiny("prophetnet", "eager")
    with torch.no_grad():
        out = case.model(**case.inputs, output_attentions=True)
    assert out.encoder_attentions[0].min() < 0
    with pytest.raises(HeadprobeError, match="scores"):
        from_attentions(out.encoder_attentions)
    measured = profile(case.model, [case.inputs])
    assert [layer.site for layer in measured.measured] == [
        *(f"encoder.layers.{layer}.self_attn" for layer in range(2)),
        *(f"decoder.layers.{layer}.cross_attn" for layer in range(2)),
    ]
    for layer in measured.measured:
        assert layer.row_sums == pytest.approx((1, 1), abs=1e-5)
    assert set(measured.left_out) == {f"decoder.layers.{layer}.self_attn" for layer in range(2)}


def test_a_softmax_by_hand_and_a_kernel_give_one_map():
    """Two implementations of one layer gave different outputs, and nobody knew which was right.

    https://github.com/huggingface/transformers/issues/32086
    """
    inputs = {"idx": ids()["input_ids"]}
    state = Nano(attend=flash).state_dict()
    maps = []
    for attend in (flash, by_hand):
        model = Nano(attend=attend).eval()
        model.load_state_dict(state)
        (call,) = seen(model, inputs)
        mixed = model.c_proj(read_out(call).transpose(1, 2).flatten(2))
        torch.testing.assert_close(mixed, model(**inputs) - model.wte(inputs["idx"]))
        maps.append(whole(call))
    torch.testing.assert_close(*maps)
