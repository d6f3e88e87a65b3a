"""The reference against hand answers, PyTorch's own attention and Llama's, and its properties."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from headprobe.attention import (
    MultiHeadAttention,
    attention_scores,
    attention_weights,
    masked_softmax,
    rotary,
    weighted_values,
)

INF = float("inf")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def qkv(heads=4, kv_heads=4, queries=5, keys=5, dim=8):
    return (
        torch.randn(2, heads, queries, dim),
        torch.randn(2, kv_heads, keys, dim),
        torch.randn(2, kv_heads, keys, dim),
    )


def some_mask(*shape):
    """A random bool mask that leaves every row its first key."""
    mask = torch.rand(*shape) > 0.4
    mask[..., 0] = True
    return mask


def as_added(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, -INF)


# Answers that can be checked by hand


def test_scores_of_shared_heads_by_hand():
    query = torch.arange(8.0).reshape(1, 4, 1, 2)  # heads (0,1) (2,3) (4,5) (6,7)
    key = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])  # kv head 0 picks feature 0, head 1 picks 1
    assert attention_scores(query, key, scale=1.0).flatten().tolist() == [0, 2, 5, 7]
    close(attention_scores(query, key).flatten(), torch.tensor([0, 2, 5, 7]) / math.sqrt(2))


def test_weights_by_hand():
    query = torch.tensor([[[[math.log(3.0)]]]])
    key = torch.tensor([[[[1.0], [0.0]]]])
    close(attention_weights(query, key).flatten(), torch.tensor([0.75, 0.25]))
    close(attention_weights(query, key, scale=2.0).flatten(), torch.tensor([0.9, 0.1]))


def test_weighted_values_of_shared_heads_by_hand():
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75], [0.0, 1.0]]).reshape(1, 4, 1, 2)
    value = torch.tensor([[0.0, 4.0], [8.0, 16.0]]).reshape(1, 2, 2, 1)
    assert weighted_values(weights, value).flatten().tolist() == [0, 2, 14, 16]


def set_arange(module):
    for linear in (module.w_q, module.w_k, module.w_v, module.w_o):
        linear.weight.data = torch.arange(16.0).reshape(4, 4)
    return module


def test_module_with_counted_weights_by_hand():
    module = set_arange(MultiHeadAttention(4, 2))
    # One key takes all: w_v (1,1,1,1) = (6, 22, 38, 54), and w_o of that.
    output = module(torch.ones(1, 1, 4))
    assert output.tolist() == [[[22 + 76 + 162, 740, 1220, 1700]]]


@pytest.mark.parametrize("key", [0, 1, 2])
def test_a_mask_of_one_key_returns_that_keys_value(key):
    module = set_arange(MultiHeadAttention(4, 2))
    x = torch.eye(4)[None, :3]
    output, weights = module(x, mask=torch.arange(3) == key, return_weights=True)
    assert torch.equal(weights, F.one_hot(torch.tensor(key), 3).float().expand(1, 2, 3, 3))
    assert torch.equal(output, module.w_o(module.w_v(x[:, key : key + 1])).expand(1, 3, 4))


def test_heads_split_the_features_not_the_length():
    module = MultiHeadAttention(8, 4)
    output, weights = module(x := torch.randn(2, 6, 8), return_weights=True)
    query, key = module.w_q(x), module.w_k(x)
    for head in range(4):
        cut = slice(2 * head, 2 * head + 2)
        scores = query[..., cut] @ key[..., cut].transpose(1, 2) / math.sqrt(2)
        close(weights[:, head], scores.softmax(-1))
    assert output.shape == x.shape


def test_norm_over_the_concatenated_heads_comes_before_w_o():
    module = MultiHeadAttention(8, 2, head_dim=3, norm_before_output=True)
    plain = MultiHeadAttention(8, 2, head_dim=3)
    plain.load_state_dict(module.state_dict(), strict=False)
    heads = []
    plain.w_o.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
    x = torch.randn(2, 5, 8)
    plain(x)
    close(module(x), module.w_o(F.layer_norm(heads[0], (6,))))


# The same numbers as PyTorch and transformers


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "padding", "causal"])
def test_equals_scaled_dot_product_attention(kv_heads, scale, kind):
    query, key, value = qkv(kv_heads=kv_heads, queries=5, keys=7)
    mask = {
        "bool": some_mask(2, 4, 5, 7),
        "float": torch.randn(5, 7),
        "padding": some_mask(2, 1, 1, 7),
    }.get(kind)
    weights = attention_weights(query, key, mask, is_causal=kind == "causal", scale=scale)
    expected = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=kind == "causal",
        scale=scale,
        enable_gqa=True,
    )
    close(weighted_values(weights, value), expected)


@pytest.mark.parametrize("keys", [3, 5, 8])
def test_causal_and_mask_are_combined(keys):
    query, key, value = qkv(queries=5, keys=keys)
    mask = some_mask(2, 1, 5, keys)
    past = torch.ones(5, keys, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask & past)
    for given_mask in (mask, mask.long(), as_added(mask)):
        weights = attention_weights(query, key, given_mask, is_causal=True)
        close(weighted_values(weights, value), expected)
        assert not weights.masked_select(~past).any()


def torch_module(*, bias):
    theirs = nn.MultiheadAttention(16, 4, bias=bias, batch_first=True).eval()
    ours = MultiHeadAttention(16, 4, bias=bias).eval()
    projections = (ours.w_q, ours.w_k, ours.w_v)
    for linear, weight in zip(projections, theirs.in_proj_weight.chunk(3), strict=True):
        linear.weight.data = weight.data.clone()
    ours.w_o.weight.data = theirs.out_proj.weight.data.clone()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
        for linear, part in zip(projections, theirs.in_proj_bias.chunk(3), strict=True):
            linear.bias.data = part.data.clone()
        ours.w_o.bias.data = theirs.out_proj.bias.data.clone()
    return ours, theirs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keys", [None, 3, 9])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "padding", "causal"])
def test_equals_torch_multihead_attention(bias, keys, kind):
    ours, theirs = torch_module(bias=bias)
    x = torch.randn(2, 6, 16)
    context = x if keys is None else torch.randn(2, keys, 16)
    # There, True hides.
    mask, padding = None, None
    options = {}
    if kind == "causal":
        mask = torch.ones(6, context.shape[1], dtype=torch.bool).tril()
        options = {"is_causal": True}
    elif kind == "padding":
        padding = some_mask(2, context.shape[1])
        options = {"mask": padding[:, None, None, :]}
    elif kind != "none":
        mask = some_mask(6, context.shape[1])
        options = {"mask": mask if kind == "bool" else as_added(mask)}
    expected, expected_weights = theirs(
        x,
        context,
        context,
        attn_mask=None if mask is None else ~mask,
        key_padding_mask=None if padding is None else ~padding,
        average_attn_weights=False,
    )
    output, weights = ours(x, None if keys is None else context, return_weights=True, **options)
    close(output, expected)
    close(weights, expected_weights)


def llama_module(implementation, base, kv_heads):
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        attn_implementation=implementation,
    )
    theirs = LlamaAttention(config, layer_idx=0).eval()
    ours = MultiHeadAttention(
        32,
        4,
        n_kv_heads=kv_heads,
        head_dim=16,
        position=rotary(config.rope_parameters["rope_theta"]),
    ).eval()
    for name in "qkvo":
        source = getattr(theirs, f"{name}_proj").weight.data.clone()
        getattr(ours, f"w_{name}").weight.data = source
    return ours, theirs, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("base", "kv_heads"), [(10000.0, 2), (500000.0, 1), (10000.0, 4)])
@pytest.mark.parametrize("kind", ["none", "causal", "padded"])
def test_equals_llama_attention(implementation, base, kv_heads, kind):
    ours, theirs, embedding = llama_module(implementation, base, kv_heads)
    x = torch.randn(2, 7, 32)
    visible = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    if kind != "none":
        visible = visible.tril()
    if kind == "padded":
        visible[1, ..., 5:] = False
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected, expected_weights = theirs(
        hidden_states=x,
        position_embeddings=embedding(x, torch.arange(7)[None]),
        attention_mask=added,
    )
    padding = visible[:, :, -1:, :] if kind == "padded" else None
    output, weights = ours(x, mask=padding, is_causal=kind != "none", return_weights=True)
    close(output, expected)
    if implementation == "eager":
        close(weights, expected_weights)
    close(ours(x, mask=added), expected)


# Properties

sizes = st.integers(1, 6)


@st.composite
def problems(draw):
    """query, key, value and a mask of any kind and any broadcastable shape."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch, kv_heads, group = draw(sizes), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys, dim = draw(sizes), draw(sizes), draw(sizes)
    query = torch.randn(batch, kv_heads * group, queries, dim)
    key, value = torch.randn(2, batch, kv_heads, keys, dim)
    full = (batch, kv_heads * group, queries, keys)
    shape = [draw(st.sampled_from([1, size])) for size in full][draw(st.integers(0, 4)) :]
    mask = torch.rand(shape) > draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    return query, key, value, draw(st.sampled_from([None, mask, mask.int(), as_added(mask)]))


def visible_keys(mask, shape):
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    return (mask > -INF if mask.is_floating_point() else mask.bool()).expand(shape)


@settings(deadline=None, max_examples=100)
@given(problems(), st.booleans())
def test_rows_sum_to_one_or_are_zero(problem, is_causal):
    query, key, value, mask = problem
    weights = attention_weights(query, key, mask, is_causal=is_causal)
    visible = visible_keys(mask, weights.shape)
    visible = visible.tril() if is_causal else visible
    close(weights.sum(-1), visible.any(-1).float())
    assert not weights[~visible].any()
    assert weights.min() >= 0
    read = weighted_values(weights, value)
    assert read.shape == query.shape
    assert not read[~visible.any(-1)].any()


@settings(deadline=None, max_examples=50)
@given(problems())
def test_permuting_keys_permutes_weights(problem):
    query, key, value, mask = problem
    order = torch.randperm(key.shape[2])
    weights = attention_weights(query, key, mask)
    permuted = mask
    if mask is not None and mask.dim() and mask.shape[-1] > 1:
        permuted = mask[..., order]
    other = attention_weights(query, key[:, :, order], permuted)
    close(other, weights[..., order])
    close(weighted_values(other, value[:, :, order]), weighted_values(weights, value))


@settings(deadline=None, max_examples=50)
@given(problems())
def test_sharing_heads_equals_repeating_them(problem):
    query, key, value, mask = problem
    group = query.shape[1] // key.shape[1]
    repeated_key, repeated_value = (side.repeat_interleave(group, dim=1) for side in (key, value))
    weights = attention_weights(query, key, mask)
    close(weights, attention_weights(query, repeated_key, mask))
    close(weighted_values(weights, value), weighted_values(weights, repeated_value))


@st.composite
def module_calls(draw):
    """A module, its inputs, and options for both."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    n_heads, n_kv_heads = draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]))
    module = MultiHeadAttention(
        12,
        n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=draw(st.sampled_from([2, 5])),
        norm_before_output=draw(st.booleans()),
    )
    batch, queries, keys = draw(sizes), draw(sizes), draw(sizes)
    x = torch.randn(batch, queries, 12)
    context = draw(st.sampled_from([None, torch.randn(batch, keys, 12)]))
    keys = queries if context is None else keys
    shapes = [
        (keys,),
        (queries, keys),
        (1, keys),
        (batch, queries, keys),
        (batch, 1, keys),
        (batch, 1, 1, keys),
        (batch, n_heads, queries, keys),
    ]
    mask = torch.rand(draw(st.sampled_from(shapes))) > 0.5
    mask = draw(st.sampled_from([None, mask, mask.long(), as_added(mask)]))
    return module, x, context, {"mask": mask, "is_causal": draw(st.booleans())}


@settings(deadline=None, max_examples=100)
@given(module_calls(), st.integers(1, 8))
def test_blocks_equal_the_whole(call, block_size):
    module, x, context, options = call
    whole = module(x, context, **options)
    assert whole.shape == x.shape
    close(module(x, context, block_size=block_size, **options), whole)


class LargestTensor(TorchDispatchMode):
    """Remembers the most entries that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


@pytest.mark.parametrize("mask", [None, torch.arange(512) < 500], ids=["no mask", "padding"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_never_make_the_map(mask, is_causal):
    module, x = MultiHeadAttention(8, 2, n_kv_heads=1), torch.randn(1, 512, 8)
    with torch.no_grad():
        with LargestTensor() as whole:
            expected = module(x, mask=mask, is_causal=is_causal)
        with LargestTensor() as blocks:
            output = module(x, mask=mask, is_causal=is_causal, block_size=16)
    assert whole.entries == 2 * 512 * 512
    assert blocks.entries == 2 * 16 * 512
    close(output, expected)


@pytest.mark.parametrize("length", [0, 1, 2, 33, 257])
def test_any_length(length):
    module, x = MultiHeadAttention(8, 4, n_kv_heads=2, position=rotary()), torch.randn(2, length, 8)
    output, weights = module(x, is_causal=True, return_weights=True)
    assert output.shape == x.shape
    assert weights.shape == (2, 4, length, length)
    close(module(x, is_causal=True, block_size=10), output)


def test_no_keys_read_nothing():
    query, key, value = qkv(keys=0)
    weights = attention_weights(query, key, torch.ones(2, 1, 1, 0))
    assert torch.equal(weighted_values(weights, value), torch.zeros(2, 4, 5, 8))


# Masks


@pytest.mark.parametrize("convert", [torch.Tensor.bool, torch.Tensor.int, torch.Tensor.byte])
def test_a_row_without_keys_is_zero_and_its_gradient_too(convert):
    mask = torch.tensor([[1, 1], [0, 0]])
    scores = torch.zeros(2, 2, requires_grad=True)
    for one_mask in (convert(mask), as_added(mask.bool())):
        weights = masked_softmax(scores, one_mask)
        assert weights.tolist() == [[0.5, 0.5], [0.0, 0.0]]
        with torch.autograd.set_detect_anomaly(True):  # raises on a NaN in any step of the way
            (gradient,) = torch.autograd.grad(weights[:, 0].sum(), scores)
        assert gradient.tolist() == [[0.25, -0.25], [0.0, 0.0]]


def test_a_mask_of_another_precision_does_not_change_that_of_the_weights():
    beyond_float32 = torch.tensor([[0.0, -1e300], [-1e300, -1e300]], dtype=torch.float64)
    weights = masked_softmax(torch.zeros(2, 2), beyond_float32)
    assert weights.dtype == torch.float32
    assert weights.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_a_mask_of_the_smallest_float_is_added_not_hidden():
    lowest = torch.full((1, 2), torch.finfo(torch.float32).min)
    assert masked_softmax(torch.zeros(1, 2), lowest).tolist() == [[0.5, 0.5]]


def test_nan_in_the_scores_is_not_covered_up():
    assert masked_softmax(torch.tensor([[math.nan, 0.0]])).isnan().all()
    assert masked_softmax(torch.zeros(1, 2), torch.tensor([[math.nan, -INF]])).isnan().any()


def test_a_module_row_without_keys_outputs_zero():
    module, x = MultiHeadAttention(8, 2), torch.randn(2, 3, 8, requires_grad=True)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    mask[0, 1] = False
    output = module(x, mask=mask)
    assert not output[0, 1].any()
    output.sum().backward()
    assert x.grad.isfinite().all()


# Training and precision


def test_dropout_acts_in_training_on_what_is_read_not_on_what_is_returned():
    module, x = MultiHeadAttention(8, 2, dropout=0.5), torch.randn(2, 6, 8)
    output, weights = module.eval()(x, return_weights=True)
    dropped, returned = module.train()(x, return_weights=True)
    assert torch.equal(returned, weights)
    assert not torch.allclose(dropped, output)
    module.dropout.p = 1.0
    assert not module(x).any()


def test_gradients_reach_every_parameter():
    module = MultiHeadAttention(8, 4, n_kv_heads=2, bias=True, norm_before_output=True)
    module(torch.randn(2, 5, 8), is_causal=True, block_size=2).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # A key bias shifts all of a row's scores alike: its gradient is zero but for rounding.
        assert name == "w_k.bias" or parameter.grad.abs().max() > 1e-6, name


@pytest.mark.parametrize("block_size", [None, 2])
def test_gradients_equal_finite_differences(block_size):
    module = MultiHeadAttention(4, 2, n_kv_heads=1, position=rotary()).double()
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x, mask=mask, block_size=block_size), x)


def test_gradients_reach_an_added_mask():
    bias = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(2, 3, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda bias: masked_softmax(scores, bias), bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_softmax_is_float32_or_better_whatever_comes_in(dtype):
    query, key, value = (side.to(dtype) for side in qkv(kv_heads=2))
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    weights = attention_weights(query, key)
    assert weights.dtype == precise
    assert weighted_values(weights, value).dtype == precise
    assert torch.equal(weights, attention_weights(query.to(precise), key.to(precise)))
    added = torch.zeros(5, dtype=torch.float16).masked_fill(torch.arange(5) > 2, -INF)
    close(attention_weights(query, key, added), attention_weights(query, key, added > -INF))


def test_autocast_does_not_lower_the_precision():
    query, key, value = qkv()
    expected = weighted_values(attention_weights(query, key), value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(weighted_values(attention_weights(query, key), value), expected)


@pytest.mark.parametrize("norm", [False, True])
def test_half_precision_modules_and_autocast_keep_the_inputs_dtype(norm):
    module = MultiHeadAttention(16, 4, norm_before_output=norm, position=rotary())
    x = torch.randn(2, 6, 16)
    expected = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = module(x, return_weights=True)
    assert (output.dtype, weights.dtype) == (torch.float32, torch.float32)
    close(output, expected, 0.05)
    lower, weights = copy.deepcopy(module).bfloat16()(x.bfloat16(), return_weights=True)
    assert (lower.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    close(lower.float(), expected, 0.05)


def test_meta_tensors_have_shapes_only():
    module, x = MultiHeadAttention(8, 2).to("meta"), torch.empty(2, 3, 8, device="meta")
    assert module(x, is_causal=True).shape == x.shape


def test_a_module_survives_pickling():
    module, x = MultiHeadAttention(8, 2, position=rotary(100.0)), torch.randn(1, 4, 8)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


# Rotary


def test_rotary_turns_each_pair_by_its_angle():
    ones = torch.ones(1, 1, 3, 4)
    query, key = rotary(base=100.0)(ones, 2 * ones)
    slow = 100.0**-0.5
    expected = [math.cos(2) - math.sin(2), math.cos(2 * slow) - math.sin(2 * slow)]
    close(query[0, 0, 2, :2], torch.tensor(expected))
    close(key, 2 * query)
    assert torch.equal(query[0, 0, 0], torch.ones(4))


def test_rotary_scores_depend_on_the_distance_alone():
    query, key = (torch.randn(1, 1, 1, 8).expand(1, 1, 9, 8) for _ in range(2))
    scores = attention_scores(*rotary()(query, key))[0, 0]
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        close(diagonal, diagonal[:1].expand_as(diagonal), 1e-5)


# Errors: what was expected, what came, what to do


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_heads": 3}, r"d_model \(8\) must be a multiple of n_heads \(3\)"),
        ({"n_heads": 4, "n_kv_heads": 3}, r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ({"n_heads": 2, "n_kv_heads": 4}, r"n_heads \(2\) must be a multiple of n_kv_heads \(4\)"),
        ({"n_heads": 0}, "n_heads must be at least 1, got 0"),
        ({"n_heads": 2, "n_kv_heads": 0}, "n_kv_heads must be at least 1, got 0"),
        ({"n_heads": 2, "head_dim": -1}, "head_dim must be at least 1, got -1"),
        ({"d_model": 0, "n_heads": 2}, "d_model must be at least 1, got 0"),
        ({"n_heads": 2, "dropout": 1.5}, "1.5"),
    ],
)
def test_wrong_sizes_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        MultiHeadAttention(**{"d_model": 8, **arguments})


def test_head_dim_frees_d_model_from_n_heads():
    assert MultiHeadAttention(8, 3, head_dim=5)(torch.randn(1, 2, 8)).shape == (1, 2, 8)


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ([(2, 5, 7)], {}, r"x must be .* d_model = 8, got \(2, 5, 7\)"),
        ([(5, 8)], {}, r"x must be \[batch, length, d_model\] .* got \(5, 8\)"),
        ([(2, 5, 8), (2, 5, 9)], {}, r"context must be .* d_model = 8, got \(2, 5, 9\)"),
        ([(2, 5, 8), (1, 5, 8)], {}, "x has 2 sequences, context 1"),
        ([(2, 5, 8)], {"block_size": 0}, "block_size must be at least 1, got 0"),
        ([(2, 5, 8)], {"block_size": 2, "return_weights": True}, "return_weights .* block_size"),
    ],
)
def test_wrong_inputs_are_named(inputs, options, text):
    with pytest.raises(ValueError, match=text):
        MultiHeadAttention(8, 2)(*(torch.randn(shape) for shape in inputs), **options)


@pytest.mark.parametrize("block_size", [None, 2])
@pytest.mark.parametrize("shape", [(6,), (2, 5), (5, 6), (3, 5, 5), (2, 3, 5, 5), (1, 2, 2, 5, 5)])
def test_wrong_mask_shapes_are_named(shape, block_size):
    text = r"mask of shape \(.*\) does not broadcast to .* \(2, 2, 5, 5\); .*\[:, None, None, :\]"
    with pytest.raises(ValueError, match=text):
        MultiHeadAttention(8, 2)(
            torch.randn(2, 5, 8), mask=torch.ones(shape), block_size=block_size
        )


def test_a_mask_may_not_widen_the_scores():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) .* shape \(1, 3\)"):
        masked_softmax(torch.zeros(1, 3), torch.ones(2, 3))


def test_integer_masks_hold_zero_and_one_only():
    with pytest.raises(ValueError, match=r"1 \(attends\) and 0 .* from -10000 to 0"):
        masked_softmax(torch.zeros(1, 2), torch.tensor([[0, -10000]]))


@pytest.mark.parametrize("function", [attention_scores, attention_weights])
def test_heads_that_cannot_share_are_named(function):
    query, key, value = qkv(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match=r"heads \(4\) must be a multiple of kv_heads \(3\)"):
        function(query, key)
    with pytest.raises(ValueError, match=r"heads \(4\) must be a multiple of kv_heads \(3\)"):
        weighted_values(torch.ones(2, 4, 5, 5), value)


def test_rotary_names_what_it_cannot_turn():
    even, odd = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 5)
    with pytest.raises(ValueError, match="got 2 keys and 3 queries"):
        rotary()(even, even[:, :, :2])
    with pytest.raises(ValueError, match="dim must be even, got 5"):
        rotary()(odd, odd)
    with pytest.raises(ValueError, match="base must be positive, got 0"):
        rotary(0)
