"""The captured weights are the model's own, and the model doesn't notice."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

import headprobe
from headprobe import Capture, HeadprobeError, NoAttentionError
from headprobe.attention import weighted_values
from tests.models import (
    MODELS,
    PLAIN,
    Cross,
    Nano,
    SequenceFirst,
    Windows,
    by_hand,
    flash,
    make,
    torch_encoder,
)

OUTPUTS = ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")


def run(model, inputs, **options):
    calls = []
    with torch.no_grad(), Capture(model, calls.append, **options) as capture:
        output = model(**inputs)
    return output, calls, capture


def first(output):
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


def whole(call, size=3):
    return torch.cat([block.weights for block in call.blocks(size)], dim=2)


def at_all_rows(call):
    return call.at(torch.arange(call.queries).expand(call.batch, -1))


def expected_maps(name, inputs):
    """The maps that the model itself gives, in the order of its calls."""
    if name in PLAIN:
        return None
    model, _ = make(name.replace("sdpa", "eager"))
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    encoder, own, decoder, cross = ([*(getattr(out, name, None) or ())] for name in OUTPUTS)
    return [*encoder, *own, *(m for pair in zip(decoder, cross, strict=True) for m in pair)]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in PLAIN])
def test_weights_equal_output_attentions(name):
    model, inputs = make(name)
    _, calls, _ = run(model, inputs)
    expected = expected_maps(name, inputs)
    assert len(calls) == len(expected)
    for call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(whole(call), weights, atol=1e-5, rtol=0)
        torch.testing.assert_close(at_all_rows(call).weights, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("cross")])
def test_weights_equal_those_of_multihead_attention(name):
    model, inputs = make(name)
    _, (call,), _ = run(model, inputs)
    masks = {k: v for k, v in inputs.items() if "mask" in k}
    _, expected = model.attn(
        *(inputs[side] for side in ("query", "key", "key")), average_attn_weights=False, **masks
    )
    torch.testing.assert_close(whole(call), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["nano_flash", "nano_bound_early"])
def test_sdpa_equals_softmax_by_hand(name):
    model, inputs = make(name)
    twin, _ = make("nano")
    (_, (seen,), _), (_, (same,), _) = run(model, inputs), run(twin, inputs)
    torch.testing.assert_close(whole(seen), whole(same), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_times_values_are_what_the_model_computed(name):
    model, inputs = make(name)
    _, calls, capture = run(model, inputs)
    assert calls
    assert capture.calls == len(calls)
    assert capture.unread == {}
    for call in calls:
        assert call.reconstruction_error(at_all_rows(call)) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_bit_identical(name):
    model, inputs = make(name)
    with torch.no_grad():
        before = first(model(**inputs))
    observed, _, _ = run(model, inputs)
    if "torch" in name or "cross" in name:  # torch leaves its fused path when it is watched
        torch.testing.assert_close(first(observed), before, atol=1e-5, rtol=1e-5, equal_nan=True)
    else:
        assert torch.equal(first(observed), before)


@pytest.mark.parametrize("name", MODELS)
def test_the_output_projection_is_the_one_that_the_model_used(name):
    model, inputs = make(name)
    outputs = {}

    def keep(module, args, output):
        outputs.setdefault(names[module], first(output))

    names = {module: name for name, module in model.named_modules()}
    for module in names:
        module.register_forward_hook(keep)
    _, calls, _ = run(model, inputs)
    for call in calls:
        projection = call.output_projection
        assert projection is not None, call.no_projection
        z = weighted_values(at_all_rows(call).weights, call.value)
        mixed = torch.einsum("bhqd,hdm->bqm", z, projection.per_head(call.heads))
        mixed = mixed if projection.bias is None else mixed + projection.bias
        if call.call == 0:
            expected = outputs[projection.site].reshape(mixed.shape)
            torch.testing.assert_close(mixed, expected, atol=1e-4, rtol=1e-4)


def test_the_projection_is_empty_where_something_lies_between():
    torch.manual_seed(0)
    model = headprobe.MultiHeadAttention(32, 4, norm_before_output=True).eval()
    _, (call,), _ = run(model, {"x": torch.randn(2, 9, 32)})
    assert call.output_projection is None
    assert call.no_projection == "'layer_norm' lies between the attention and the linear map"


@pytest.mark.parametrize("change", [lambda y: y * y.sigmoid(), lambda y: y.mul_(0.5)])
def test_the_projection_is_empty_behind_a_gate(change):
    model, inputs = Nano(attend=lambda q, k, v: change(by_hand(q, k, v))), make("nano")[1]
    _, (call,), _ = run(model.eval(), inputs)
    assert call.output_projection is None
    assert "lies between" in call.no_projection


def test_the_projection_is_empty_where_two_maps_take_the_output():
    class Adapted(Nano):
        def __init__(self):
            super().__init__(attend=flash)
            self.c_proj = LowRank(32)

    class LowRank(nn.Linear):
        def __init__(self, width):
            super().__init__(width, width)
            self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)

        def forward(self, x):
            return super().forward(x) + self.up(self.down(x))

    _, (call,), _ = run(Adapted().eval(), make("nano")[1])
    assert call.output_projection is None
    assert call.no_projection.startswith("more than one linear map took the attention output")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sites_streams_and_kv_heads(attention):
    _, calls, _ = run(*make(f"t5-{attention}"))
    ours, theirs = ("input_ids",) * 2, ("decoder_input_ids", "input_ids")
    assert [(c.site, c.streams) for c in calls] == [
        ("encoder.block.0.layer.0.SelfAttention", ours),
        ("encoder.block.1.layer.0.SelfAttention", ours),
        ("decoder.block.0.layer.0.SelfAttention", ("decoder_input_ids",) * 2),
        ("decoder.block.0.layer.1.EncDecAttention", theirs),
        ("decoder.block.1.layer.0.SelfAttention", ("decoder_input_ids",) * 2),
        ("decoder.block.1.layer.1.EncDecAttention", theirs),
    ]
    _, calls, _ = run(*make(f"llama-{attention}"))
    assert [(c.heads, c.kv_heads) for c in calls] == [(4, 2), (4, 2)]


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("reference", 4), ("reference_gqa", 2), ("reference_mqa", 1)]
)
def test_kv_heads_of_the_reference(name, kv_heads):
    _, (call,), _ = run(*make(name))
    assert (call.heads, call.kv_heads) == (4, kv_heads)


@pytest.mark.parametrize("padding", [slice(0, 3), slice(6, 9)])
def test_padding_that_is_set_to_0_does_not_make_heads_equal(padding):
    model, _ = make("reference")
    x = torch.randn(1, 9, 32)
    x[:, padding] = 0
    _, (call,), _ = run(model, {"x": x})
    assert call.kv_heads == 4


def test_streams_of_plain_modules():
    _, calls, _ = run(*make("torch_transformer"))
    assert [c.streams for c in calls] == [
        *[("src", "src")] * 2,
        *[("tgt", "tgt"), ("tgt", "src")] * 2,
    ]
    _, (call,), _ = run(*make("cross"))
    assert call.streams == ("query", "key")


def test_a_shared_module_counts_its_calls_anew_in_each_pass():
    model, inputs = make("shared")
    seen = []
    with torch.no_grad(), Capture(model, lambda call: seen.append((call.site, call.call))):
        model(**inputs)
        model(**inputs)
    assert seen == [("block", 0), ("block", 1), ("block", 2)] * 2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_of_a_causal_model_see_themselves_and_what_is_before(attention):
    model, inputs = make(f"gpt2-{attention}")
    _, calls, _ = run(model, inputs)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for call in calls:
        block = at_all_rows(call)
        visible = block.visible.expand(2, 4, 9, 9)
        assert not block.weights[~visible].any()
        assert torch.equal(visible[0], causal.expand(4, 9, 9))
        assert torch.equal(visible[1, :, :6, :6], causal[:6, :6].expand(4, 6, 6))
        assert not visible[1, :, :6, 6:].any()


def test_weights_are_those_before_dropout():
    torch.manual_seed(0)
    model = headprobe.MultiHeadAttention(32, 4, dropout=0.5).train()
    x = torch.randn(2, 9, 32)
    for attended in (model, nn.TransformerEncoderLayer(32, 4, 37, dropout=0.5, batch_first=True)):
        _, (call,), _ = run(attended, {"x" if attended is model else "src": x})
        torch.testing.assert_close(whole(call).sum(-1), torch.ones(2, 4, 9))
        assert call.output is None


@pytest.mark.parametrize("dropout", [F.dropout, torch.dropout])
def test_dropout_that_is_off_leaves_the_output_comparable(dropout):
    word = "training" if dropout is F.dropout else "train"

    def attend(q, k, v):
        return dropout((q @ k.mT).softmax(dim=-1), p=0.5, **{word: False}) @ v

    _, (call,), _ = run(Nano(attend=attend), make("nano")[1])
    assert call.output is not None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_draws_the_same_numbers_when_it_is_watched(attention):
    model, inputs = make(f"bert-{attention}")
    model.train()
    torch.manual_seed(1)
    alone = model(**inputs)[0]
    torch.manual_seed(1)
    watched, calls, _ = run(model, inputs)
    assert torch.equal(watched[0], alone)
    assert all(torch.allclose(whole(c).sum(-1), torch.ones(())) for c in calls)
    assert model.training


class Hooks:
    """All hooks that a model has, the global ones included."""

    def __init__(self, model):
        self.seen = [
            dict(hooks)
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ]
        self.seen += [dict(modules._global_forward_hooks), dict(modules._global_forward_pre_hooks)]


class Planned(Exception):
    pass


def fail(*args):
    raise Planned


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["nowhere", "model", "observer", "interrupt"])
def test_the_model_is_as_before(where):
    model, inputs = make("bert-sdpa")
    model.pooler.dense.register_forward_hook(fail if where == "model" else lambda *args: None)
    model.train()
    model.encoder.layer[0].eval()
    flags = [module.training for module in model.modules()]
    before, config = Hooks(model).seen, model.config.to_dict()
    observed = []
    observe = {"observer": fail, "interrupt": interrupt}.get(where, observed.append)
    expected = {"nowhere": (), "interrupt": KeyboardInterrupt}.get(where, Planned)
    if expected:
        with pytest.raises(expected), Capture(model, observe):
            model(**inputs)
    else:
        run(model, inputs)
    assert Hooks(model).seen == before
    assert model.config.to_dict() == config
    assert [module.training for module in model.modules()] == flags
    assert torch.overrides._get_current_function_mode_stack() == []
    if where == "model":  # the last call waits for its W_O when the model fails: it is dropped
        assert len(observed) == 1


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "torch_encoder"])
def test_nothing_is_retained(name):
    model, inputs = make(name)
    kept = []

    def observe(call):
        tensors = (call.query, call.key, call.value, call.weights, call.mask, call.output)
        kept.extend(weakref.ref(t) for t in tensors if t is not None and t is not inputs)

    with torch.no_grad(), Capture(model, observe):
        model(**inputs)
        gc.collect()
        alive = [ref() for ref in kept if ref() is not None]
        assert len(kept) > 4
        assert all(any(t is given for given in inputs.values()) for t in alive)


GATED = ["bert-eager", "bert-sdpa", "llama-eager", "llama-sdpa", "nano", "nano_folded", "cross"]


@pytest.mark.parametrize("name", [*GATED, "cross_separate", "nano_heads_last", "reference_gqa"])
def test_a_closed_gate_equals_a_zeroed_output_projection(name):
    model, inputs = make(name)
    _, calls, _ = run(model, inputs)
    call = calls[-1]
    gate = torch.ones(call.heads)
    gate[1] = 0
    gated, _, _ = run(model, inputs, gates={call.site: gate})
    with torch.no_grad():
        call.output_projection.per_head(call.heads)[1] = 0  # a view of the model's own weight
        zeroed = first(model(**inputs))
    torch.testing.assert_close(first(gated), zeroed, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "gpt2-sdpa", "cross"])
def test_the_gradient_of_a_gate_is_the_central_difference(name):
    model, inputs = make(name)
    model = model.double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    site = run(model, inputs)[1][0].site

    def loss(gate):
        with Capture(model, gates={site: gate}):
            return first(model(**inputs)).pow(2).sum()

    gate = torch.ones(4, dtype=torch.double, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(gate), gate)
    for head in range(4):
        step = torch.zeros(4, dtype=torch.double)
        step[head] = 1e-5
        with torch.no_grad():
            difference = (loss(gate + step) - loss(gate - step)) / 2e-5
        torch.testing.assert_close(slope[head], difference, rtol=1e-6, atol=1e-6)


def test_a_gate_per_sequence():
    model, inputs = make("bert-sdpa")
    site = "encoder.layer.1.attention.self"
    gates = torch.ones(2, 4)
    gates[0] = 0
    mixed, _, _ = run(model, inputs, gates={site: gates})
    closed, _, _ = run(model, inputs, gates={site: torch.zeros(4)})
    opened, _, _ = run(model, inputs)
    torch.testing.assert_close(mixed[0][0], closed[0][0])
    torch.testing.assert_close(mixed[0][1], opened[0][1])


def test_gates_that_do_not_fit():
    model, inputs = make("bert-sdpa")
    site = "encoder.layer.1.attention.self"
    with pytest.raises(
        ValueError, match=r"gates\['.*self'\] has 8 entries, that layer has 4 heads"
    ):
        run(model, inputs, gates={site: torch.ones(8)})
    with pytest.raises(HeadprobeError, match=r"gates for 'encoder\.layer' were never applied"):
        run(model, inputs, gates={"encoder.layer": torch.ones(4)})


def test_no_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1))
    with pytest.raises(NoAttentionError, match="no softmax attention was seen") as caught:
        run(model, {"input": torch.randn(2, 4)})
    assert "run the plain PyTorch module" in str(caught.value)
    with Capture(model):
        pass  # nothing ran: nothing to complain about


def test_a_softmax_that_is_no_attention_is_not_taken_for_one():
    class Routed(Nano):
        def __init__(self):
            super().__init__(attend=flash)
            self.router = nn.Linear(32, 3)
            self.experts = nn.Parameter(torch.randn(3, 32, 32))

        def forward(self, idx):
            x = super().forward(idx)
            share = self.router(x).softmax(dim=-1)
            mixed = torch.einsum("bse,edf,bsd->bsf", share, self.experts, x)
            return (mixed @ self.wte.weight.t()).softmax(dim=-1)

    _, calls, capture = run(Routed().eval(), make("nano")[1])
    assert [call.site for call in calls] == [""]
    assert capture.unread == {}


def test_a_map_that_cannot_be_followed_is_named():
    def strange(q, k, v):
        by_hand(q, k, v)
        weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return (weights[..., None] * v[:, :, None]).sum(dim=-2)

    _, calls, capture = run(Nano(attend=strange).eval(), make("nano")[1])
    assert len(calls) == 1
    assert capture.unread == {"": "its result was never multiplied with values"}


def test_fully_masked_rows_are_zeros_or_what_the_model_has():
    model, inputs = make("cross")
    mask = torch.zeros(5, 9, dtype=torch.bool)
    mask[0] = True
    _, (call,), _ = run(model, inputs | {"attn_mask": mask})
    weights = whole(call)
    assert torch.equal(weights[:, :, 0], torch.zeros(2, 4, 9))
    torch.testing.assert_close(weights[:, :, 1:].sum(-1), torch.ones(2, 4, 4))


def test_generate_with_a_cache():
    model, inputs = make("gpt2-sdpa")
    shapes = []
    with torch.no_grad(), Capture(model, lambda call: shapes.append((call.queries, call.keys))):
        model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=1)
    assert shapes == [(9, 9)] * 2 + [(1, 10)] * 2 + [(1, 11)] * 2


def test_captures_nest():
    model, inputs = make("bert-eager")
    outer, inner = [], []
    with torch.no_grad(), Capture(model, outer.append), Capture(model, inner.append):
        model(**inputs)
    assert [c.site for c in outer] == [c.site for c in inner]
    assert len(inner) == 2


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "llama-sdpa"])
def test_weights_of_a_bfloat16_model_are_float32(name):
    model, inputs = make(name)
    _, calls, _ = run(model.bfloat16(), inputs)
    for call in calls:
        weights = whole(call)
        assert weights.dtype == torch.float32
        assert (weights.sum(-1) - 1).abs().max() < 5e-3
        assert call.reconstruction_error(at_all_rows(call)) < 5e-2


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_fused_path_of_torch_is_left(batch_first):
    torch.manual_seed(0)
    model, inputs = torch_encoder(batch_first)
    _, calls, _ = run(model.eval(), inputs)
    assert [c.site for c in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(not block.weights[1, ..., 6:].any() for c in calls for block in c.blocks(4))


def test_sequences_that_are_not_batched():
    torch.manual_seed(0)
    model = Cross().eval()
    inputs = {"query": torch.randn(5, 32), "key": torch.randn(9, 32)}
    _, (call,), _ = run(model, inputs)
    _, expected = model.attn(*inputs.values(), inputs["key"], average_attn_weights=False)
    torch.testing.assert_close(whole(call)[0], expected)


def test_a_part_of_the_model_can_be_run_by_itself():
    model, inputs = make("bart-sdpa")
    calls = []
    with torch.no_grad(), Capture(model, calls.append) as capture:
        capture.mark(inputs)
        model.encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    assert [c.site for c in calls] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert calls[0].streams == ("input_ids", "input_ids")


def test_gradients_flow_through_the_weights():
    model, inputs = make("nano_flash")
    with Capture(model, lambda call: whole(call).pow(2).sum().backward()):
        model(**inputs)
    assert model.c_attn.weight.grad[:64].abs().sum() > 0
    assert F.normalize(model.c_attn.weight.grad, dim=0).isfinite().all()


def test_a_model_inside_torch_func_is_seen():
    model, inputs = make("nano_flash")

    def total(parameters):
        return torch.func.functional_call(model, parameters, (inputs["idx"],)).sum()

    parameters, calls = dict(model.named_parameters()), []
    expected = torch.func.grad(total)(parameters)
    with Capture(model, calls.append):
        found = torch.func.grad(total)(parameters)
    assert len(calls) == 1
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding(attention):
    model, inputs = make(f"gpt2-{attention}")
    mask = inputs["attention_mask"].flip(-1)
    inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    _, calls, _ = run(model, inputs)
    for call, expected in zip(calls, expected_maps(f"gpt2-{attention}", inputs), strict=True):
        rows = at_all_rows(call)
        torch.testing.assert_close(rows.weights[:, :, 3:], expected[:, :, 3:], atol=1e-5, rtol=0)
        assert not rows.visible.expand(2, 4, 9, 9)[1, :, 3:, :3].any()


@pytest.mark.parametrize("axes", [(3, 1), (3, 2), (1, 2)])
def test_each_window_has_its_own_mask(axes):
    mask = torch.rand(*axes, 5, 5) > 0.4
    mask[..., 0] = True
    _, (call,), _ = run(Windows().eval(), {"x": torch.randn(3, 3, 5, 8), "mask": mask})
    assert call.heads == 6
    assert call.reconstruction_error(at_all_rows(call)) < 1e-5


@pytest.mark.parametrize("axes", [(8, 2), (9, 2), (2, 9), (3, 3)])
def test_the_batch_may_be_the_second_axis(axes):
    model, x = SequenceFirst().eval(), torch.randn(*axes, 32)
    _, (call,), _ = run(model, {"x": x})
    q, k = (side.unflatten(-1, (4, 8)) for side in model.qkv(x).chunk(3, dim=-1)[:2])
    expected = torch.einsum("ibhd,jbhd->bhij", q, k).softmax(dim=-1)
    torch.testing.assert_close(whole(call), expected)
    assert call.output_projection.site == "o"


def test_windows_that_look_like_heads_are_sequences_of_their_own():
    class Projected(Windows):
        def __init__(self):
            super().__init__()
            self.o = nn.Linear(8, 8)

        def forward(self, x, mask):
            return self.o(super().forward(x, mask).transpose(-2, -3).flatten(-2))

    model, x = Projected().eval(), torch.randn(3, 4, 5, 8)
    mask = torch.rand(4, 1, 5, 5) > 0.4
    mask[..., 0] = True
    _, (call,), _ = run(model, {"x": x, "mask": mask})
    assert (call.batch, call.heads, call.queries) == (12, 2, 5)
    q, k, _ = (s.unflatten(-1, (2, 4)).transpose(-2, -3) for s in model.qkv(x).chunk(3, dim=-1))
    scores = (q @ k.mT / 2).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(whole(call), scores.softmax(dim=-1).flatten(0, 1))
    assert call.output_projection.site == "o"
    assert call.reconstruction_error(at_all_rows(call)) < 1e-5


@pytest.mark.parametrize("length", [2, 4, 9])
def test_a_map_whose_rows_are_turned_into_heads_is_refused(length):
    def turned(q, k, v):
        weights = (q @ k.mT).softmax(dim=-1).transpose(1, 2)
        return (weights @ v[:, :1]).transpose(1, 2)

    with pytest.raises(NoAttentionError, match="never multiplied with values"):
        run(Nano(attend=turned).eval(), {"idx": torch.ones(2, length, dtype=torch.long)})


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "cross"])
def test_a_gate_keeps_the_precision_of_the_model(name):
    model, inputs = make(name)
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    output, calls, _ = run(model.bfloat16(), inputs)
    gated, _, _ = run(model, inputs, gates={calls[0].site: torch.ones(4)})
    assert first(gated).dtype == torch.bfloat16
    torch.testing.assert_close(first(gated), first(output))


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "cross"])
def test_what_an_observer_computes_is_no_attention(name):
    model, inputs = make(name)
    seen = []

    def observe(call):
        seen.append(call.site)
        call.reconstruction_error(at_all_rows(call))

    with torch.no_grad(), Capture(model, observe) as outer, Capture(model, observe) as inner:
        model(**inputs)
    assert outer.calls == inner.calls == len(seen) / 2
    assert outer.unread == inner.unread == {}


def test_an_interrupted_pass_is_forgotten():
    model, inputs = make("bert-sdpa")
    seen = []
    hook = model.encoder.layer[1].register_forward_hook(interrupt)
    with torch.no_grad(), Capture(model, lambda call: seen.append(call.site)):
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        hook.remove()
        seen.clear()
        model(**inputs)
    assert seen == [f"encoder.layer.{layer}.attention.self" for layer in range(2)]


def test_a_compiled_model_is_seen():
    model, inputs = make("nano")
    model.compile(backend="eager")
    with torch.no_grad():
        before = model(**inputs)
    observed, calls, _ = run(model, inputs)
    assert len(calls) == 1
    torch.testing.assert_close(observed, before)


def by_exp(q, k, v):
    scores = q @ k.mT
    powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return powers / powers.sum(dim=-1, keepdim=True) @ v


def test_a_softmax_written_as_exp_and_a_division_is_read():
    model, inputs = Nano(attend=by_exp).eval(), {"idx": torch.randint(0, 60, (2, 9))}
    _, (call,), _ = run(model, inputs)
    q, k, _ = (
        s.unflatten(-1, (4, 8)).transpose(1, 2)
        for s in model.c_attn(model.wte(inputs["idx"])).chunk(3, -1)
    )
    torch.testing.assert_close(whole(call), (q @ k.mT).softmax(dim=-1))
    assert not call.sink


def test_values_that_are_divided_by_the_sum_of_the_weights_are_left_out():
    def late(q, k, v):
        powers = (q @ k.mT).exp()
        return powers @ v / powers.sum(dim=-1, keepdim=True)

    result = headprobe.profile(Nano(attend=late), [{"idx": torch.randint(0, 60, (2, 9))}])
    assert result.measured == ()
    assert "its rows don't sum to 1" in result.left_out[""]


@pytest.mark.parametrize("keys", [2, 9])
def test_attention_without_a_softmax_is_none_to_show(keys):
    def linear(q, k, v):
        return torch.sigmoid(q @ k.mT) @ v

    model, calls = Nano(attend=linear).eval(), []
    capture = Capture(model, calls.append)
    with pytest.raises(NoAttentionError, match="no softmax attention was seen"), capture:
        model(torch.randint(0, 60, (2, keys)))
    assert calls == []
    assert "meet the values without a softmax" in capture.unread[""]


def test_the_values_may_come_first_in_an_einsum():
    def swapped(q, k, v):
        weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(dim=-1)
        return torch.einsum("bhjd,bhij->bhid", v, weights)

    inputs = {"idx": torch.randint(0, 60, (2, 9))}
    torch.manual_seed(0)
    _, (call,), _ = run(Nano(attend=swapped).eval(), inputs)
    torch.manual_seed(0)
    _, (same,), _ = run(Nano(attend=by_exp).eval(), inputs)
    torch.testing.assert_close(whole(call), whole(same))
    assert call.reconstruction_error(at_all_rows(call)) < 1e-6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_the_way_out():
    nested = torch.nested.nested_tensor([torch.randn(5, 16), torch.randn(7, 16)])
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    with pytest.raises(HeadprobeError, match="to_padded_tensor"), torch.no_grad(), Capture(model):
        model(nested, nested, nested)


class Flex(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (
            side.unflatten(-1, (2, 8)).transpose(1, 2) for side in self.qkv(x).chunk(3, dim=-1)
        )
        return self.o(flex_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_flex_kernel_is_named():
    with pytest.raises(NoAttentionError, match="flex_attention keeps its scores to itself"):
        run(Flex().eval(), {"x": torch.randn(2, 16, 16)})


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_closed_kernel_of_a_transformers_model_is_switched_and_restored():
    model, inputs = make("llama-sdpa")
    expected = headprobe.profile(model, [inputs])
    model.set_attn_implementation("flex_attention")
    _, calls, _ = run(model, inputs)
    assert [call.seam for call in calls] == ["sdpa", "sdpa"]
    result = headprobe.profile(model, [inputs])
    assert model.config._attn_implementation == "flex_attention"
    assert result.switched == {"flex_attention": "sdpa"}
    assert expected.switched == {}
    assert result.heads().equals(expected.heads())


def test_each_kernel_is_restored():
    model, _ = make("bart-sdpa")
    model.config._attn_implementation = "flex_attention"
    model.encoder.config = type(model.config)(**model.config.to_dict())
    model.encoder.config._attn_implementation = "eager"
    with Capture(model):
        assert model.config._attn_implementation == "sdpa"
        assert model.encoder.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "flex_attention"
    assert model.encoder.config._attn_implementation == "eager"


def test_keys_and_values_may_be_shared_by_groups_of_other_sizes():
    def shared(q, k, v):
        return F.scaled_dot_product_attention(q, k[:, :2], v, enable_gqa=True)

    model, inputs = Nano(attend=shared).eval(), {"idx": torch.randint(0, 60, (2, 9))}
    _, (call,), _ = run(model, inputs)
    assert call.kv_heads == 4
    assert call.reconstruction_error(at_all_rows(call)) < 1e-5


def test_numbers_without_axes_may_be_derived_from_the_input():
    class Scaled(Nano):
        def forward(self, idx):
            return super().forward(idx) * (idx.sum() * torch.ones(2, 3, 1, 1)).mean()

    _, calls, _ = run(Scaled(attend=flash).eval(), {"idx": torch.ones(2, 9, dtype=torch.long)})
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_generation_with_a_cache_is_seen_step_by_step():
    """First all queries, then one a step; grouped heads may then come as rows of one head."""
    model, inputs = make("llama-sdpa")
    eager, _ = make("llama-eager")
    calls = []
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), Capture(model, calls.append):
        tokens = model.generate(**inputs, **options)
    expected = eager.generate(
        **inputs, **options, return_dict_in_generate=True, output_attentions=True
    )
    assert torch.equal(tokens, expected.sequences)
    maps = [layer for step in expected.attentions for layer in step]
    assert len(calls) == len(maps) == 6
    for call, weights in zip(calls, maps, strict=True):
        assert (call.heads, call.kv_heads) == (4, 2)
        assert call.output_projection is not None
        torch.testing.assert_close(whole(call), weights)


def test_a_text_of_one_token_has_all_its_heads():
    model, _ = make("llama-sdpa")
    inputs = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": torch.ones(2, 1).long()}
    _, calls, _ = run(model, inputs)
    assert [(call.heads, call.queries) for call in calls] == [(4, 1)] * 2
    assert len(headprobe.profile(model, [inputs]).heads()) == 8


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((lambda x: x,), TypeError, "the model is a function: expected a torch nn.Module"),
        ((nn.Identity(), 3), TypeError, "observe is a int"),
        ((nn.Identity(), None, {"": [1.0]}), TypeError, "is a list: expected a tensor"),
        ((nn.Identity(), None, {"": torch.tensor(1.0)}), ValueError, r"is \[\]: expected"),
        ((nn.Identity(), None, {"": torch.tensor([1.0, torch.nan])}), ValueError, "finite numbers"),
    ],
)
def test_arguments_that_can_never_work_are_refused_at_once(arguments, kind, message):
    model, observe, gates = (*arguments, None, None)[:3]
    with pytest.raises(kind, match=message):
        Capture(model, observe, gates=gates)


@pytest.mark.parametrize("fused", [False, True])
def test_a_map_that_mixes_two_lots_of_values_is_measured_once(fused):
    def halves(q, k, v):
        if fused:
            return torch.cat(
                [F.scaled_dot_product_attention(q, k, half) for half in v.chunk(2, dim=-1)], dim=-1
            )
        weights = (q @ k.mT).mul(8**-0.5).softmax(dim=-1)
        return torch.cat([weights @ half for half in v.chunk(2, dim=-1)], dim=-1)

    model, inputs = Nano(attend=halves).eval(), {"idx": torch.randint(0, 60, (2, 9))}
    _, calls, _ = run(model, inputs)
    assert [call.repeats for call in calls] == [None, 0]
    torch.testing.assert_close(whole(calls[0]), whole(calls[1]))
    result = headprobe.profile(model, [inputs])
    assert len(result.heads()) == 4
    assert result.left_out == {}


def test_two_maps_of_a_module_are_two():
    def twice(q, k, v):
        return F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(k, q, v)

    _, calls, _ = run(Nano(attend=twice).eval(), {"idx": torch.randint(0, 60, (2, 9))})
    assert [call.repeats for call in calls] == [None, None]


def test_a_mixture_of_states_is_no_attention_without_a_softmax():
    class Mixed(Nano):
        def forward(self, idx):
            x = super().forward(idx)
            mixing = x[..., :4, None] @ x[..., None, :4]  # [batch, positions, 4, 4]
            return (mixing @ x.unflatten(-1, (4, 8))).flatten(2)

    _, calls, capture = run(Mixed(attend=flash).eval(), {"idx": torch.randint(0, 60, (2, 9))})
    assert len(calls) == 1
    assert capture.unread == {}


class Queries(nn.Module):
    """Learned queries that read a sequence, and then one another."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 3, 32))
        self.read, self.mix = (headprobe.MultiHeadAttention(32, 4) for _ in range(2))

    def forward(self, x, attention_mask):
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + self.read(latents, x, mask=attention_mask[:, None, None].bool())
        return latents + self.mix(latents)


def test_learned_queries_are_no_padded_input():
    model, x = Queries().eval(), torch.randn(2, 9, 32)
    mask = torch.ones(2, 9).long()
    mask[1, 5:] = 0
    _, calls, _ = run(model, {"x": x, "attention_mask": mask})
    assert [call.streams for call in calls] == [("(learned)", "x"), ("(learned)", "(learned)")]
    result = headprobe.profile(model, [{"x": x, "attention_mask": mask}])
    assert result.left_out == {}
    alone = [{"x": x[:1], "attention_mask": mask[:1]}]
    alone.append({"x": x[1:, :5], "attention_mask": mask[1:, :5]})
    expected = headprobe.profile(model, alone)
    for name in ("entropy", "first", "output_norm"):
        torch.testing.assert_close(
            torch.tensor(result.heads()[name].to_numpy()),
            torch.tensor(expected.heads()[name].to_numpy()),
            atol=2e-6,
            rtol=0,
        )


MOVED = {
    "flip": lambda q, k, v: F.scaled_dot_product_attention(q, k.flip(-2), v.flip(-2)),
    "roll": lambda q, k, v: F.scaled_dot_product_attention(q, k.roll(1, 2), v.roll(1, 2)),
    "index": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :, torch.randperm(k.shape[2])], v
    ),
    "map": lambda q, k, v: (q @ k.mT).softmax(-1).flip(-1) @ v.flip(-2),
    "gather": lambda q, k, v: F.scaled_dot_product_attention(
        q.gather(2, torch.randint(0, 9, q.shape)), k, v
    ),
}


@pytest.mark.parametrize("how", MOVED)
def test_positions_in_another_order_are_left_out(how):
    result = headprobe.profile(Nano(attend=MOVED[how]), [{"idx": torch.randint(0, 60, (2, 9))}])
    assert result.measured == ()
    assert "its positions may be in another order" in result.left_out[""]


STAYS = {
    "features": lambda q, k, v: F.scaled_dot_product_attention(q.flip(-1), k.flip(dims=(-1,)), v),
    "slices": lambda q, k, v: F.scaled_dot_product_attention(
        torch.cat([q[..., 4:], q[..., :4]], dim=-1), k, v
    ),
    "there_and_back": lambda q, k, v: F.scaled_dot_product_attention(q.flip(2).flip(2) + q, k, v),
}


@pytest.mark.parametrize("how", STAYS)
def test_features_that_are_moved_move_no_position(how):
    result = headprobe.profile(Nano(attend=STAYS[how]), [{"idx": torch.randint(0, 60, (2, 9))}])
    assert result.left_out == {}


def test_heads_may_be_mixed_before_the_softmax_and_not_after():
    mixing = torch.randn(4, 4)

    def before(q, k, v):
        return torch.einsum("bhij,hg->bgij", q @ k.mT, mixing).softmax(dim=-1) @ v

    def after(q, k, v):
        return torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(dim=-1), mixing) @ v

    def twice(q, k, v):
        weights = (q @ k.mT).softmax(dim=-1)
        return weights @ weights @ v

    inputs = {"idx": torch.randint(0, 60, (2, 9))}
    _, (call,), _ = run(Nano(attend=before).eval(), inputs)
    assert whole(call).sum(-1).sub(1).abs().max() < 1e-6
    for attend in (after, twice):
        with pytest.raises(NoAttentionError):
            headprobe.profile(Nano(attend=attend), [inputs])


def test_values_may_be_multiplied_from_the_left():
    """As in blocks of autoencoders of images: values [.., dim, keys] times turned weights."""

    def turned(q, k, v):
        weights = (q @ k.mT).softmax(dim=-1)
        return (v.mT @ weights.permute(0, 1, 3, 2)).mT

    model, inputs = Nano(attend=turned).eval(), {"idx": torch.randint(0, 60, (2, 9))}
    expected = model(**inputs)
    output, (call,), _ = run(model, inputs)
    assert torch.equal(output, expected)
    assert call.reconstruction_error(at_all_rows(call)) < 1e-6
    assert call.output_projection.site == "c_proj"
    gated, _, _ = run(model, inputs, gates={"": torch.zeros(4)})
    torch.testing.assert_close(gated, model.wte(inputs["idx"]) + model.c_proj.bias)


def test_turned_weights_before_the_values_are_no_attention():
    def turned(q, k, v):
        return (q @ k.mT).softmax(dim=-1).mT @ v

    with pytest.raises(NoAttentionError, match="rows and keys were swapped before"):
        run(Nano(attend=turned).eval(), {"idx": torch.randint(0, 60, (2, 9))})
