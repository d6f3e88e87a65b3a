"""Public reports of what a head is: shared keys, joined matrices, shared layers, towers."""

import pytest
import torch

from headprobe import Capture, profile
from tests.cases import assert_own_maps, read_out, seen, tiny
from tests.models import make
from tests.test_capture import first, whole


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("kind", "kv_heads"), [("mistral", 2), ("falcon", 1), ("starcoder2", 2), ("phi3", 4)]
)
def test_heads_that_share_keys(kind, kv_heads, attention):
    """With fewer key heads than query heads, tools crashed or gave silently wrong numbers.

    https://github.com/TransformerLensOrg/TransformerLens/pull/1593
    https://github.com/TransformerLensOrg/TransformerLens/issues/980
    https://github.com/TransformerLensOrg/TransformerLens/pull/520
    """
    case = tiny(kind, attention)
    calls = seen(case.model, case.inputs)
    assert [(call.heads, call.kv_heads) for call in calls] == [(4, kv_heads)] * 2
    for call in calls:
        z = read_out(call)
        torch.testing.assert_close(z, call.output, atol=1e-5, rtol=1e-4)
        assert call.output_projection.per_head(4).shape[:2] == (4, z.shape[-1])
    assert_own_maps(case, calls, 2)


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "falcon", "bloom", "gpt_neox", "t5", "deepseek_v3", "mpt"]
)
def test_one_head_is_switched_off_in_any_model(kind):
    """Interventions on heads worked for one model alone.

    https://github.com/stanfordnlp/pyvene/issues/158
    https://github.com/facebookresearch/llm-transparency-tool/pull/21
    """
    case = tiny(kind, "eager")
    call = seen(case.model, case.inputs)[-1]
    gate = torch.ones(call.heads)
    gate[1] = 0
    with torch.no_grad():
        with Capture(case.model, gates={call.site: gate}):
            gated = first(case.model(**case.inputs))
        call.output_projection.per_head(call.heads)[1] = 0  # a view of the model's own weight
        expected = first(case.model(**case.inputs))
    torch.testing.assert_close(gated, expected, atol=1e-5, rtol=1e-4)


def test_queries_keys_and_values_of_one_matrix_are_told_apart():
    """A matrix of queries, keys and values was cut into rows of the wrong heads.

    https://github.com/BlackSamorez/tensor_parallel/pull/103
    """
    model, inputs = make("gpt2-sdpa")
    taken = []
    model.transformer.h[0].attn.c_attn.register_forward_hook(lambda m, args, out: taken.append(out))
    call = seen(model, inputs)[0]
    for index, side in enumerate((call.query, call.key, call.value)):
        for head in range(4):
            start = 32 * index + 8 * head
            assert torch.equal(side[:, head], taken[0][..., start : start + 8])


def test_a_query_matrix_that_also_makes_gates():
    """Queries and gates come out of one matrix, head by head: twice as wide as it seems.

    https://github.com/NeuraLegion/shainet/pull/199
    """
    case = tiny("qwen3_next")
    (call,) = seen(case.model, case.inputs)
    attention = case.model.get_submodule(call.site)
    assert attention.q_proj.out_features == 2 * call.heads * call.query.shape[-1]
    assert call.output_projection is None  # each head's output is gated before it is mixed
    assert "lies between" in call.no_projection
    assert_own_maps(case, [call], 1)


def test_queries_and_keys_of_rotary_models_give_the_map():
    """A view of queries and keys neuron by neuron was not to be had for models with rotary ones.

    https://github.com/jessevig/bertviz/issues/128
    https://github.com/jessevig/bertviz/issues/130
    """
    model, inputs = make("llama-sdpa")
    for call in seen(model, inputs):
        neurons = (
            call.query[..., :, None, :]
            * call.key.repeat_interleave(call.heads // call.key.shape[1], dim=1)[..., None, :, :]
        )
        scores = neurons.sum(dim=-1) * (call.scale or call.query.shape[-1] ** -0.5)
        later = torch.ones(9, 9, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        torch.testing.assert_close(whole(call)[0], expected[0])


def test_one_module_that_is_several_layers():
    """Layers that share their weights are one module, which runs once for each of them."""
    case = tiny("albert")
    calls = seen(case.model, case.inputs)
    assert len({call.site for call in calls}) == 1
    assert [call.call for call in calls] == list(range(case.model.config.num_hidden_layers))
    heads = profile(case.model, [case.inputs]).heads()
    assert heads["layer"].tolist() == [layer for layer in range(2) for _ in range(4)]
    assert_own_maps(case, calls, 2)


def test_two_towers_keep_their_layers_apart():
    """A model of images and texts has two sequences, of which one has padding and the other not."""
    case = tiny("clip")
    calls = seen(case.model, case.inputs)
    assert {call.streams for call in calls} == {
        ("pixel_values", "pixel_values"),
        ("input_ids", "input_ids"),
    }
    measured = profile(case.model, [case.inputs])
    assert [layer.padding_mass for layer in measured.measured] == [None, None, 0, 0]
    assert measured.heads()["stack"].unique().tolist() == ["vision", "text"]
    assert_own_maps(case, calls, 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_values_of_another_width_than_queries(attention):
    """Latent attention has queries and keys of one width and values of another."""
    case = tiny("deepseek_v3", attention)
    calls = seen(case.model, case.inputs)
    for call in calls:
        width = case.model.get_submodule(call.site).qk_head_dim
        assert width != call.value.shape[-1]
        torch.testing.assert_close(read_out(call), call.output, atol=1e-5, rtol=1e-4)
        assert call.output_projection.weight.shape[0] == call.heads * call.value.shape[-1]
    assert_own_maps(case, calls, 2)
