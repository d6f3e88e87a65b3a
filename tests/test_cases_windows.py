"""Public reports of windows, blocks, sinks and long texts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headprobe import Capture, HeadprobeError, NoAttentionError, from_attentions, profile
from scripts.sweep.compare import own_maps
from tests.cases import assert_own_maps, heads_of, seen, tiny
from tests.models import Nano, flash
from tests.test_capture import whole


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "phi3"])
def test_a_window_is_as_wide_as_it_is_said_to_be(kind, attention):
    """A sliding window was half, or twice, as wide as said, or was not there with some kernels.

    https://github.com/huggingface/transformers/issues/29777
    https://github.com/huggingface/transformers/issues/28980
    https://github.com/huggingface/transformers/pull/40700
    https://github.com/unslothai/unsloth/pull/8253
    https://github.com/hiyouga/LlamaFactory/issues/7063
    """
    case = tiny(kind, attention)
    case.model.config.sliding_window = 4
    case.inputs = {"input_ids": case.inputs["input_ids"]}
    widths = set()
    for call in seen(case.model, case.inputs):
        block = next(call.blocks(12))
        visible = block.visible.expand(2, call.heads, 12, 12)
        assert torch.equal(visible, block.weights > 0)
        counts = visible.sum(dim=-1)
        assert (counts == counts[0, 0]).all()
        widths.add(tuple(counts[0, 0].tolist()))
    windowed = tuple(min(row + 1, 4) for row in range(12))
    assert windowed in widths
    assert widths <= {windowed, tuple(range(1, 13))}  # of several kinds of layers, some see all


def test_columns_of_a_local_window_are_no_keys():
    """Maps of local attention have a column per place in the window, not one per token.

    https://github.com/huggingface/transformers/pull/5659
    https://github.com/huggingface/transformers/issues/7562
    """
    case = tiny("longformer", "eager")
    with pytest.raises(NoAttentionError, match="no attention map could be read: in 'encoder"):
        profile(case.model, [case.inputs])
    with torch.no_grad():
        out = case.model(**case.inputs, output_attentions=True)
    with pytest.raises(HeadprobeError, match="columns of a window") as caught:
        from_attentions(out, **case.inputs)
    assert "12 queries and 513 keys" in str(caught.value)


def test_mass_that_goes_to_a_learned_sink_is_not_handed_out_to_tokens():
    """The column of a learned sink is dropped, so that rows sum to less than 1.

    https://github.com/jax-ml/jax/issues/30964
    https://github.com/fla-org/flash-linear-attention/pull/831
    """
    case = tiny("gpt_oss", "eager")
    calls = seen(case.model, case.inputs)
    assert_own_maps(case, calls, 2)
    real = case.inputs["attention_mask"].bool()
    missing = []
    for call in calls:
        assert call.sink
        sums = whole(call).sum(dim=-1)
        assert sums.max() < 1
        missing.append(torch.stack([1 - sums[:, head][real].mean() for head in range(call.heads)]))
    found = heads_of(profile(case.model, [case.inputs]), "missing")[:, 0]
    torch.testing.assert_close(found, torch.cat(missing).double(), atol=1e-6, rtol=0)
    assert found.min() > 0.1


def test_windows_of_images_are_sequences_with_heads_of_their_stage():
    """Maps of shifted windows have a window where others have an image, and heads grow by stage."""
    case = tiny("swinv2", "eager")
    calls = seen(case.model, case.inputs)
    assert [(c.batch, c.heads, c.queries) for c in calls[::2]] == [
        tuple(weights.shape[:3]) for weights in own_maps(case)
    ]
    assert calls[0].batch > 2
    assert calls[0].heads < calls[2].heads
    assert_own_maps(case, calls, 4)
    measured = profile(case.model, [case.inputs])
    for call in calls:
        reason = measured.left_out.get(call.site, "")
        assert bool(reason) == (call.queries == 49), reason  # 8 patches a side, filled up to 14


def test_attention_in_blocks_is_left_out_with_the_reason():
    """Rows of block-sparse attention, as the model returns them, sum to 0.8 and less."""
    from transformers import BigBirdConfig, BigBirdModel

    config = BigBirdConfig(
        vocab_size=70,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        block_size=2,
        num_random_blocks=1,
    )
    model = BigBirdModel(config).eval()
    inputs = {"input_ids": torch.randint(1, 60, (2, 32))}
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    assert out.attentions[0].sum(dim=-1).min() < 0.9
    with pytest.raises(HeadprobeError, match="so part of it is missing"):
        from_attentions(out, **inputs)
    measured = profile(model, [inputs])
    assert measured.measured == ()
    assert "of the 32 query rows (blocks" in measured.left_out["encoder.layer.0.attention.self"]


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                self.entries = max(self.entries, made.numel())
        return result


def test_a_long_text_needs_no_whole_map():
    """Maps of a long text did not fit into memory, though only a figure of each was wanted.

    https://github.com/huggingface/transformers/pull/43213
    https://github.com/huggingface/transformers/issues/9387
    https://github.com/inseq-team/inseq/issues/279
    https://github.com/jessevig/bertviz/issues/82
    https://github.com/jessevig/bertviz/issues/2
    https://github.com/msakarvadia/AttentionLens/issues/5
    https://github.com/msakarvadia/AttentionLens/issues/14
    """
    model, inputs = Nano(attend=flash).eval(), {"idx": torch.randint(0, 60, (1, 700))}
    with Largest() as largest:
        assert len(profile(model, [inputs]).heads()) == 4
    with Largest() as with_a_map, torch.no_grad(), Capture(model, lambda call: whole(call, 700)):
        model(**inputs)
    assert largest.entries < 4 * 700**2 <= with_a_map.entries
