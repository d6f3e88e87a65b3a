"""Public reports of cross-attention and of models that generate."""

import pytest
import torch
from torch.nn import functional as F

from headprobe import Capture, profile
from tests.cases import seen, tiny
from tests.models import ids, make
from tests.test_capture import whole


@pytest.fixture(params=["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def translator(request):
    import transformers

    base, _ = make("t5-sdpa" if "T5" in request.param else "bart-sdpa")
    torch.manual_seed(0)
    return getattr(transformers, request.param)(base.config).eval()


GENERATION = {"do_sample": False, "num_beams": 1, "pad_token_id": 0}


def rows_of(calls):
    """Maps of each module, the rows of all its calls one below the other."""
    found = {}
    for call in calls:
        found.setdefault(call.site, []).append(whole(call))
    keys = {site: max(m.shape[-1] for m in maps) for site, maps in found.items()}
    return {
        site: torch.cat([F.pad(m, (0, keys[site] - m.shape[-1])) for m in maps], dim=2)
        for site, maps in found.items()
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cross_maps_of_generation_are_those_of_one_pass(translator):
    """Cross-attentions were missing, or of another shape when the model generated.

    https://github.com/huggingface/transformers/issues/7246
    https://github.com/huggingface/transformers/issues/10335
    https://github.com/huggingface/transformers/issues/11788
    https://github.com/huggingface/transformers/issues/17327
    https://github.com/huggingface/transformers/issues/33296
    """
    inputs, steps = ids(padded=0), []
    with torch.no_grad(), Capture(translator, steps.append):
        out = translator.generate(**inputs, min_new_tokens=4, max_new_tokens=4, **GENERATION)
    passed = seen(translator, {**inputs, "decoder_input_ids": out[:, :-1]})
    found, expected = rows_of(steps), rows_of(passed)
    assert found.keys() == expected.keys()
    for site, weights in expected.items():
        torch.testing.assert_close(found[site], weights, atol=1e-5, rtol=0)
    cross = [call for call in passed if call.streams == ("decoder_input_ids", "input_ids")]
    assert [(call.queries, call.keys) for call in cross] == [(4, 9)] * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama-sdpa", "llama-eager"])
def test_generation_gives_a_square_first_and_then_single_rows(name):
    """While it generates, a model gives a square map first and then one row a step.

    https://github.com/huggingface/transformers/issues/26174
    https://github.com/TransformerLensOrg/TransformerLens/issues/889
    """
    model, _ = make(name)
    inputs, steps = ids(padded=0), []
    with torch.no_grad(), Capture(model, steps.append):
        out = model.generate(**inputs, min_new_tokens=3, max_new_tokens=3, **GENERATION)
    shapes = [(9, 9), (1, 10), (1, 11)]
    assert [(call.queries, call.keys) for call in steps[::2]] == shapes
    found, expected = rows_of(steps), rows_of(seen(model, {"input_ids": out[:, :-1]}))
    for site, weights in expected.items():
        torch.testing.assert_close(found[site], weights, atol=1e-5, rtol=0)


def test_cross_heads_of_a_speech_model_are_ranked():
    """For a model of one's own it had to be guessed which heads align words with sound.

    https://github.com/huggingface/transformers/issues/28365
    """
    case = tiny("whisper")
    calls = seen(case.model, case.inputs)
    cross = [call for call in calls if call.streams == ("decoder_input_ids", "input_features")]
    assert len(cross) == 2
    heads = profile(case.model, [case.inputs]).heads().query("kind == 'cross'")
    expected = torch.cat([whole(call).amax(dim=-1).mean(dim=(0, 2)) for call in cross])
    found = torch.tensor(heads["confidence"].to_numpy())
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=0)
    assert heads["site"].unique().tolist() == [call.site for call in cross]
    ranked = heads.sort_values("confidence").iloc[-1]
    best = int(expected.argmax())
    assert (ranked["layer"], ranked["head"]) == divmod(best, 4)
