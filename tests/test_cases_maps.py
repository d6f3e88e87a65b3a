"""Public reports of attentions that are not there at all."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headprobe
from headprobe import HeadprobeError, NoAttentionError, from_attentions, profile
from tests.cases import assert_own_maps, read_out, seen, tiny
from tests.models import Nano, flash, make
from tests.test_capture import whole


def tokens(*shape):
    return torch.randint(1, 60, shape)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_maps_under_sdpa_are_those_the_model_used(kind):
    """Under sdpa a map had to come from a second computation, which nobody could trust.

    https://github.com/huggingface/transformers/issues/31990
    """
    case = tiny(kind)
    calls = seen(case.model, case.inputs)
    outputs = {}
    for call in calls:
        owner = case.model.get_submodule(call.output_projection.site)
        owner.register_forward_hook(lambda m, args, out: outputs.update({m: (args[0], out)}))
    with torch.no_grad():
        case.model(**case.inputs)
    for call in calls:
        assert call.seam == "sdpa"
        z = read_out(call)
        taken, given = outputs[case.model.get_submodule(call.output_projection.site)]
        torch.testing.assert_close(z.transpose(1, 2).flatten(2), taken, atol=1e-5, rtol=1e-4)
        per_head = call.output_projection.per_head(call.heads)
        mixed = torch.einsum("bhqd,hdm->bqm", z, per_head)
        bias = call.output_projection.bias
        mixed = mixed if bias is None else mixed + bias
        torch.testing.assert_close(mixed, given, atol=1e-5, rtol=1e-4)
    assert_own_maps(case, calls, 2)


def test_a_missing_map_says_what_to_do():
    """A warning about sdpa was taken for an error, since it did not say what to change.

    https://github.com/huggingface/transformers/issues/33858
    """
    case = tiny("llama")
    with torch.no_grad():
        out = case.model(**case.inputs)
    for given in (out, [None, None]):
        with pytest.raises(HeadprobeError, match="attn_implementation='eager'") as caught:
            from_attentions(given, **case.inputs)
        assert "headprobe.profile" in str(caught.value)


@pytest.mark.parametrize("kind", ["dpt", "dinov2", "vit"])
def test_vision_models_keep_their_maps_under_sdpa(kind):
    """Vision models gave no attentions any more when sdpa became their default.

    https://github.com/huggingface/transformers/pull/33660
    """
    case = tiny(kind)
    calls = seen(case.model, case.inputs)
    assert {call.seam for call in calls} == {"sdpa"}
    assert_own_maps(case, calls, 2)


class Remote(Nano):
    """As code that comes with weights is often written: it takes a flag and drops it, or raises."""

    def __init__(self, *, strict):
        super().__init__(attend=flash)
        self.strict = strict

    def forward(self, input_ids, attention_mask=None, output_attentions=None):
        if self.strict and output_attentions:
            raise ValueError("output_attentions is not supported")
        return {"logits": super().forward(input_ids), "attentions": None}


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_ignores_or_refuses_output_attentions_has_maps(strict, tmp_path):
    """Models with code of their own return None for attentions, or raise when they are asked.

    https://github.com/OpenSenseNova/SenseNova-U1/pull/242
    https://github.com/OpenGVLab/InternVL/issues/1188
    https://github.com/MeiGen-AI/MultiTalk/issues/54
    https://github.com/deepbeepmeep/Wan2GP/issues/654
    https://github.com/ML-GSAI/LLaDA/issues/114
    https://github.com/PAIR-code/lit/issues/676
    """
    model, inputs = Remote(strict=strict).eval(), {"input_ids": tokens(2, 9)}
    (call,) = seen(model, inputs)
    x = model.c_attn(model.wte(inputs["input_ids"]))
    q, k, _ = (side.unflatten(-1, (4, 8)).transpose(1, 2) for side in x.split(32, dim=-1))
    scores = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(whole(call), scores.softmax(dim=-1))
    measured = profile(model, [inputs])
    headprobe.write_report(measured, tmp_path)
    assert len(measured.heads()) == 4
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["qwen2_5_vl_vision", "qwen3_vl", "internvl"])
def test_models_of_images_and_text_have_maps_under_sdpa(kind):
    """Only eager gives maps of such a model, and then it takes several times the memory.

    https://github.com/QwenLM/Qwen3-VL/issues/1106
    """
    case = tiny(kind)
    calls = seen(case.model, case.inputs)
    twins = seen(tiny(kind, "eager").model, case.inputs)
    assert [call.site for call in calls] == [call.site for call in twins]
    for call, twin in zip(calls, twins, strict=True):
        assert (call.seam, twin.seam) == ("sdpa", "softmax")
        assert call.weights is None  # the map is rebuilt by rows when it is asked for
        torch.testing.assert_close(whole(call), whole(twin), atol=1e-5, rtol=0)


def test_cross_maps_need_no_fallback():
    """Asked for cross-attention, a translation model left sdpa, and a warning broke the caller.

    https://github.com/sillsdev/machine.py/issues/150
    """
    case = tiny("m2m_100")
    calls = seen(case.model, case.inputs)
    cross = [call for call in calls if call.streams == ("decoder_input_ids", "input_ids")]
    assert [call.seam for call in cross] == ["sdpa"] * 2
    assert case.model.config._attn_implementation == "sdpa"
    assert_own_maps(case, calls, 6)


class Switched(Nano):
    """With a switch between a fused kernel and a softmax whose dropout people hook."""

    def __init__(self):
        super().__init__(attend=self._attend)
        self.fused = True
        self.attn_drop = nn.Dropout(0.0)

    def _attend(self, q, k, v):
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return self.attn_drop((q * q.shape[-1] ** -0.5 @ k.mT).softmax(dim=-1)) @ v


def test_a_hooked_dropout_that_a_fused_kernel_skips():
    """A hook on the dropout of the weights collected nothing, and an index was out of range.

    https://github.com/jacobgil/vit-explain/issues/23
    """
    model, inputs = Switched().eval(), {"idx": tokens(2, 9)}
    hooked = []
    model.attn_drop.register_forward_hook(lambda module, args, out: hooked.append(out))
    (call,) = seen(model, inputs)
    assert hooked == []
    model.fused = False
    model(**inputs)
    torch.testing.assert_close(whole(call), hooked[0])


class Block(nn.Module):
    """A vision transformer's block around torch's own attention, whose weights are not returned."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, batch_first=batch_first)

    def forward(self, x, attn_mask=None):
        return x + self.attn(x, x, x, need_weights=False, attn_mask=attn_mask)[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_that_are_not_returned_or_averaged_over_heads(batch_first, causal):
    """Torch's own attention is called without weights, or gives the mean over the heads.

    https://github.com/jacobgil/vit-explain/issues/27
    https://github.com/huggingface/pytorch-image-models/pull/2220
    https://github.com/mlfoundations/open_clip/issues/795
    https://github.com/mlfoundations/open_clip/issues/732
    https://github.com/openai/CLIP/issues/18
    """
    model, x = Block(batch_first=batch_first).eval(), torch.randn(2, 9, 32)
    x = x if batch_first else x.transpose(0, 1)
    mask = torch.full((9, 9), -torch.inf).triu(1) if causal else None
    (call,) = seen(model, {"x": x, "attn_mask": mask})
    _, expected = model.attn(x, x, x, attn_mask=mask, average_attn_weights=False)
    _, mean = model.attn(x, x, x, attn_mask=mask)
    torch.testing.assert_close(whole(call), expected)
    torch.testing.assert_close(whole(call).mean(dim=1), mean)
    assert call.heads == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_torchs_encoder_shows_its_maps():
    """In eval mode a hook on the attention is not called, and no weights are asked for.

    https://github.com/pytorch/pytorch/issues/99304
    https://github.com/pytorch/pytorch/issues/128413
    https://github.com/pytorch/pytorch/issues/82919
    https://github.com/pytorch/pytorch/issues/88810
    """
    layer = nn.TransformerEncoderLayer(32, 4, 37, batch_first=True)
    model, src = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 9, 32)
    padding = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])
    calls = seen(model, {"src": src, "src_key_padding_mask": padding})
    assert [call.site for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    _, expected = model.layers[0].self_attn(
        src, src, src, key_padding_mask=padding, average_attn_weights=False
    )
    torch.testing.assert_close(whole(calls[0]), expected)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3}, {"is_causal": True}, {"attn_mask": torch.eye(9) - 1}]
)
def test_sdpa_does_not_return_its_weights(kv_heads, options):
    """To get weights out of sdpa its values had to be an identity matrix, which is huge.

    https://github.com/pytorch/pytorch/issues/119811
    https://github.com/pytorch/pytorch/issues/143993
    """
    options = options | {"enable_gqa": True}
    taken = []

    def attend(q, k, v):
        taken[:] = q, k[:, :kv_heads]
        return F.scaled_dot_product_attention(q, k[:, :kv_heads], v[:, :kv_heads], **options)

    (call,) = seen(Nano(attend=attend).eval(), {"idx": tokens(2, 9)})
    identity = torch.eye(9).expand(2, kv_heads, 9, 9)
    expected = F.scaled_dot_product_attention(*taken, identity, **options)
    torch.testing.assert_close(whole(call), expected)


def test_flash_attention_gives_no_usable_probabilities():
    """What a flash kernel returns as probabilities is empty, unscaled, or negative where dropped.

    https://github.com/Dao-AILab/flash-attention/issues/1357
    https://github.com/Dao-AILab/flash-attention/issues/561
    https://github.com/Dao-AILab/flash-attention/issues/1824
    """
    model, inputs = make("llama-sdpa")
    expected = profile(model, [inputs])
    model.config._attn_implementation = "flash_attention_2"
    measured = profile(model, [inputs])
    assert measured.switched == {"flash_attention_2": "sdpa"}
    assert measured.heads().equals(expected.heads())
    assert model.config._attn_implementation == "flash_attention_2"
    signed = torch.randn(1, 4, 9, 9).softmax(-1) * torch.randn(1, 4, 9, 9).sign()
    with pytest.raises(HeadprobeError, match="negative"):
        from_attentions([signed])


@torch.library.custom_op("headprobe_cases::paged", mutates_args=())
def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A kernel that torch can't look into, as inference servers have."""
    return F.scaled_dot_product_attention(q, k, v)


def test_a_servers_kernel_shows_no_scores():
    """People want attention scores from an inference server, whose kernels never make them.

    https://github.com/vllm-project/vllm/issues/3192
    https://github.com/vllm-project/vllm/issues/11365
    """
    with pytest.raises(NoAttentionError, match="a custom kernel") as caught:
        profile(Nano(attend=paged), [{"idx": tokens(2, 9)}])
    assert "run the plain PyTorch module" in str(caught.value)


def test_modules_that_are_called_with_keywords_only():
    """A hook before the attention got an empty tuple, because all arguments were keywords.

    https://github.com/huggingface/transformers/issues/29247
    """
    model, inputs = make("llama-sdpa")
    calls = seen(model, inputs)
    with torch.no_grad():
        positional = []
        with headprobe.Capture(model, positional.append):
            model(inputs["input_ids"], inputs["attention_mask"])
    for call, same in zip(calls, positional, strict=True):
        assert call.streams == same.streams == ("input_ids", "input_ids")
        assert torch.equal(whole(call), whole(same))


@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForPreTraining"]
)
def test_the_class_decides_where_in_the_output_the_attentions_are(name):
    """With another class of the same model the wrong part of its output was taken for attentions.

    https://github.com/jerryji1993/DNABERT/issues/89
    """
    import transformers

    bert, inputs = make("bert-eager")
    torch.manual_seed(0)
    model = getattr(transformers, name)(bert.config).eval()
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
    expected = profile(model, [inputs])
    found = from_attentions(out, **inputs)
    assert len(found.heads()) == len(expected.heads()) == 8
    assert found.heads()["entropy"].tolist() == pytest.approx(
        expected.heads()["entropy"].tolist(), abs=1e-5
    )
    with pytest.raises(HeadprobeError):
        from_attentions(out.hidden_states, **inputs)
