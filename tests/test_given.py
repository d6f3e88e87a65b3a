"""Maps that somebody already has give the figures of the running model, or are refused."""

from collections import OrderedDict

import numpy as np
import pandas as pd
import pytest
import torch
from pandas.testing import assert_frame_equal

import headprobe
from headprobe.profile import Profile, from_attentions
from tests.models import VOCABULARY, ids, make

CLASSES = {"special": {1, 2, 3}, "punctuation": {4, 5}}
TABLES = ("heads", "pairs", "layers", "intervals")


def outputs(name, **changes):
    """What a model of tests/models.py gives, and its inputs."""
    model, inputs = make(name)
    inputs |= changes
    with torch.no_grad():
        return model, inputs, model(**inputs, output_attentions=True)


OF_PLACES = ["distance", "distance_ratio", "distance_unnormalized", "special"]


def without_places(table):
    if "statistic" in table:
        return table[~table["statistic"].isin(OF_PLACES)].reset_index(drop=True)
    return table.drop(columns=[*OF_PLACES, "distance_unit", "distance_mean"], errors="ignore")


def assert_same_figures(given, real, *, of_images=False):
    """All tables to 1e-6, but for what the values and W_O are needed for, and the names."""
    for table in TABLES:
        mine, other = getattr(given, table)(), getattr(real, table)()
        if table == "heads":
            assert mine[["output_norm", "kv_group"]].isna().all(axis=None)
            unknown = ["output_norm", "kv_group", "site"]
            mine, other = mine.drop(columns=unknown), other.drop(columns=unknown)
        if of_images:  # where patches lie, the run knows alone
            mine, other = without_places(mine), without_places(other)
        if table == "intervals":
            other = other[other["statistic"] != "output_norm"].reset_index(drop=True)
        assert_frame_equal(mine, other, check_exact=False, atol=1e-6, rtol=1e-6)
    assert (given.texts, given.tokens) == (real.texts, real.tokens)
    assert given.class_tokens == real.class_tokens


def left_padded(batch=2, length=9, padded=3):
    inputs = ids(batch, length, padded)
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
    return inputs | {"position_ids": positions}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bart", "vit"])
def test_figures_are_those_of_the_running_model(name):
    model, inputs, out = outputs(f"{name}-eager")
    given = from_attentions(out, token_classes=CLASSES, **inputs)
    real = headprobe.profile(model, [inputs], token_classes=CLASSES)
    assert_same_figures(given, real, of_images=name == "vit")
    assert given.heads()[OF_PLACES].isna().all(axis=None) == (name == "vit")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_on_the_left_is_kept_out(name):
    model, inputs, out = outputs(f"{name}-eager", **left_padded())
    given = from_attentions(out.attentions, **inputs)
    assert set(given.heads()["kind"]) == {"causal"}
    assert_same_figures(given, headprobe.profile(model, [inputs]))


def test_sampled_rows_of_long_texts_are_those_of_the_running_model():
    model, inputs, out = outputs("gpt2-eager", **ids(length=100, padded=17))
    assert_same_figures(
        from_attentions(out.attentions, **inputs), headprobe.profile(model, [inputs])
    )


def test_a_window_is_read_off_layer_by_layer():
    from transformers import MistralConfig, MistralModel

    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=37,
        sliding_window=4,
        attn_implementation="eager",
    )
    model, inputs = MistralModel(config).eval(), ids(length=12)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    assert_same_figures(
        from_attentions(out.attentions, **inputs), headprobe.profile(model, [inputs])
    )


def test_batches_add_up_are_saved_and_loaded(tmp_path):
    model, inputs, out = outputs("bert-eager", **ids(batch=6))
    whole = from_attentions(out.attentions, **inputs)
    halves = [
        from_attentions(
            [weights[part] for weights in out.attentions],
            **{name: value[part] for name, value in inputs.items()},
        )
        for part in (slice(0, 2), slice(2, 6))
    ]
    halves[0].save(tmp_path / "half.safetensors")
    added = Profile.load(tmp_path / "half.safetensors") + halves[1]
    for table in TABLES:
        mine, other = getattr(added, table)(), getattr(whole, table)()
        assert_frame_equal(mine, other, check_exact=False, atol=1e-12, rtol=0)
    layer = added.measured[1]
    assert (layer.site, layer.seam, layer.kv_heads) == ("layer.1", "given", None)
    assert layer.reconstruction_error is None
    with pytest.raises(headprobe.HeadprobeError, match="profiles with different model can't be"):
        added + headprobe.profile(model, [inputs])


def test_the_forms_of_the_same_maps():
    _, _, out = outputs("gpt2-eager")
    maps = out.attentions  # of two texts, as if none had padding
    mask = torch.ones(2, 9)
    expected = from_attentions(maps, attention_mask=mask)
    arrays = [weights.numpy() for weights in maps]
    cache = OrderedDict({"hook_embed": torch.zeros(2, 9, 32)})
    for i, weights in enumerate(maps):
        cache[f"blocks.{i}.attn.hook_attn_scores"] = weights.log()
        cache[f"blocks.{i}.attn.hook_pattern"] = weights
    forms = [
        list(maps),
        arrays,
        np.stack(arrays),
        torch.stack(maps),
        [array[:, ::-1][:, ::-1].astype(">f4") for array in arrays],
        {"attentions": maps, "logits": out.logits},
        cache,
    ]
    for form in forms:
        found = from_attentions(form, attention_mask=mask, kind="bidirectional")
        pd.testing.assert_frame_equal(
            found.heads().drop(columns="site"),
            from_attentions(maps, attention_mask=mask, kind="bidirectional")
            .heads()
            .drop(columns="site"),
        )
    assert set(expected.heads()["kind"]) == {"causal"}
    sites = [layer.site for layer in from_attentions(cache, attention_mask=mask).measured]
    assert sites == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]


def test_one_text_needs_no_batch_axis():
    _, inputs, out = outputs("bert-eager", **ids(batch=1, padded=0))
    expected = from_attentions(out.attentions, **inputs)
    alone = [weights[0] for weights in out.attentions]
    for form in (alone, torch.stack(alone), torch.stack(alone).numpy()):
        assert_frame_equal(from_attentions(form, **inputs).heads(), expected.heads())


def test_a_cache_of_hooks_that_is_no_mapping_numbers_layers_by_their_keys():
    class Cache:  # has the methods of a mapping, and is none
        def __init__(self, maps):
            self.maps = maps

        def __getitem__(self, key):
            return self.maps[key]

        def __iter__(self):
            return iter(self.maps)

        def keys(self):
            return self.maps.keys()

    maps = {f"blocks.{i}.attn.hook_pattern": torch.rand(4, 5, 5).softmax(-1) for i in (3, 7)}
    assert from_attentions(Cache(maps)).layers()["layer"].tolist() == [3, 7]


def test_the_sides_of_a_cache_of_hooks():
    _, inputs, out = outputs("t5-eager")
    cache = {}
    for i in range(2):
        cache[f"encoder.{i}.attn.hook_pattern"] = out.encoder_attentions[i]
        cache[f"decoder.{i}.attn.hook_pattern"] = out.decoder_attentions[i]
        cache[f"decoder.{i}.cross_attn.hook_pattern"] = out.cross_attentions[i]
    by_key = from_attentions(cache, **inputs).heads().drop(columns=["site", "nearest_head"])
    by_name = from_attentions(out, **inputs).heads()
    key = ["kind", "stack", "layer", "head"]
    merged = by_key.merge(by_name, on=key, suffixes=("", "_by_name"))
    assert len(merged) == len(by_name) == 24
    for column in ("entropy", "distance", "first", "nearest_similarity"):
        np.testing.assert_allclose(merged[column], merged[f"{column}_by_name"], atol=1e-12)


def test_cross_attention_alone():
    weights = torch.rand(2, 4, 5, 9).softmax(dim=-1)
    found = from_attentions([weights], kind="cross")
    assert set(found.heads()["kind"]) == {"cross"}
    mask = torch.ones(2, 9)
    mask[1, 6:] = 0
    hidden = (weights * mask[:, None, None]) / (weights * mask[:, None, None]).sum(-1, True)
    padded = from_attentions({"cross_attentions": [hidden]}, attention_mask=mask)
    apart = [
        from_attentions({"cross_attentions": [hidden[i : i + 1, ..., :n]]})
        for i, n in enumerate((9, 6))
    ]
    np.testing.assert_allclose(
        padded.heads()["entropy_normalized"],
        (apart[0] + apart[1]).heads()["entropy_normalized"],
        atol=1e-7,
    )


def test_the_padding_of_an_encoders_states_has_a_mask_of_its_own():
    queries = torch.rand(1, 2, 4, 4).softmax(dim=-1)
    keys = torch.zeros(1, 2, 4, 4)
    keys[..., :3] = torch.rand(1, 2, 4, 3).softmax(dim=-1)
    masks = {"attention_mask": torch.ones(1, 4), "encoder_attention_mask": torch.ones(1, 4)}
    masks["encoder_attention_mask"][0, 3] = 0
    out = {"attentions": [queries], "cross_attentions": [keys]}
    heads = from_attentions(out, **masks).heads()
    assert heads["site"].tolist() == ["layer.0"] * 2 + ["layer.0.cross"] * 2
    entropies = -(keys[0, :, :, :3] * keys[0, :, :, :3].log()).sum(-1).mean(-1) / np.log(3)
    np.testing.assert_allclose(heads["entropy_normalized"][2:], entropies, atol=1e-6)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_maps_of_generation_are_put_together(name, use_cache):
    model, _ = make(f"{name}-eager")
    prompt = ids(padded=0)["input_ids"]
    if name == "t5":  # without a language model's head it can't generate
        from transformers import T5ForConditionalGeneration

        torch.manual_seed(1)
        model = T5ForConditionalGeneration(model.config).eval()
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_attentions=True,
        pad_token_id=0,
    )
    read = out.sequences[:, :-1]
    batch = {"input_ids": read}
    if name == "t5":
        batch = {"input_ids": prompt, "decoder_input_ids": read}
    assert_same_figures(from_attentions(out, **batch), headprobe.profile(model, [batch]))
    if name == "gpt2":
        with pytest.raises(ValueError, match=r"after generate, give the ids and the mask of the"):
            from_attentions(out, input_ids=prompt)


def test_maps_of_beams_and_of_a_window_of_the_cache_are_refused():
    step = [torch.rand(1, 2, 3, 3).softmax(-1)], [torch.rand(1, 2, 1, 3).softmax(-1)]
    with pytest.raises(headprobe.HeadprobeError, match="don't fit together in"):
        from_attentions(step)
    with pytest.raises(headprobe.HeadprobeError, match="come from beam search"):
        from_attentions({"attentions": step[:1], "beam_indices": torch.zeros(1, 3)})


def test_layers_without_a_map_are_left_out():
    found = from_attentions([torch.rand(4, 5, 5).softmax(-1), None])
    assert found.left_out == {"layer.1": "no map was given (None)"}
    assert len(found.heads()) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_told_by_the_numbers_even_when_they_were_cast_since(dtype):
    weights = torch.rand(2, 4, 50, 50).softmax(dim=-1)
    low = weights.to(dtype)
    if dtype == torch.bfloat16:  # beyond what full precision is allowed
        low = (low.float() * 1.003).to(dtype)
        assert float((low.float().sum(-1) - 1).abs().max()) > 1e-3
    for form in ([low], [low.float().numpy()], [low.double()]):
        heads = from_attentions(form).heads()
        np.testing.assert_allclose(
            heads["entropy"], from_attentions([weights]).heads()["entropy"], atol=0.02
        )


def test_kind_settles_what_zeros_cannot_tell():
    weights = torch.eye(5).expand(1, 2, 5, 5)
    assert set(from_attentions([weights]).heads()["kind"]) == {"causal"}
    heads = from_attentions([weights], kind="bidirectional").heads()
    assert set(heads["kind"]) == {"bidirectional"}
    assert heads["distance_ratio"].tolist() == [0.0, 0.0]
    with pytest.raises(headprobe.HeadprobeError, match="kind is 'causal', but the maps of 'layer"):
        from_attentions([torch.full((1, 2, 5, 5), 0.2)], kind="causal")
    with pytest.raises(ValueError, match="of several stacks: leave it out"):
        from_attentions(
            {"attentions": [weights], "cross_attentions": [weights]}, kind="bidirectional"
        )
    with pytest.raises(ValueError, match="kind is 'masked': expected 'bidirectional', 'causal'"):
        from_attentions([weights], kind="masked")


def test_padding_that_was_not_told_is_noticed():
    for name, inputs in (("bert", ids()), ("gpt2", ids()), ("gpt2", left_padded())):
        _, inputs, out = outputs(f"{name}-eager", **inputs)
        with pytest.raises(headprobe.HeadprobeError, match="give attention_mask"):
            from_attentions(out.attentions)
        with pytest.raises(headprobe.HeadprobeError, match="give attention_mask"):
            from_attentions(out.attentions, input_ids=inputs["input_ids"])


def test_rows_of_padding_may_hold_anything():
    _, inputs, out = outputs("bert-eager")
    expected = from_attentions(out.attentions, **inputs)
    broken = [weights.clone() for weights in out.attentions]
    for weights in broken:
        weights[1, :, 6:] = torch.nan
    assert_frame_equal(from_attentions(broken, **inputs).heads(), expected.heads())


def test_given_maps_are_not_changed():
    _, inputs, out = outputs("bert-eager")
    before = [weights.clone() for weights in out.attentions]
    from_attentions(out.attentions, **inputs)
    assert all(map(torch.equal, out.attentions, before))


def test_sdpa_makes_no_maps():
    model, inputs = make("bert-sdpa")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(headprobe.HeadprobeError, match="attn_implementation='eager'"):
        from_attentions(model(**inputs), **inputs)


def test_dropout_is_named():
    model, inputs = make("bert-eager")
    model.train()
    out = model(**inputs, output_attentions=True)
    with pytest.raises(headprobe.HeadprobeError, match="so dropout acted on it: call"):
        from_attentions(out.attentions, **inputs)


UNIFORM = torch.full((2, 4, 5, 5), 0.2)
NAN = UNIFORM.clone()
NAN[0, 0, 0, 0] = torch.nan


@pytest.mark.parametrize(
    ("maps", "error", "message"),
    [
        ((), headprobe.HeadprobeError, "the attentions are empty (sdpa makes no maps): load"),
        ({"attentions": ()}, headprobe.HeadprobeError, "'attentions' is empty (sdpa"),
        ({"logits": UNIFORM}, headprobe.HeadprobeError, "no attention maps under 'logits': expect"),
        ({}, headprobe.HeadprobeError, "no attention maps under no key"),
        ([None, None], headprobe.HeadprobeError, "all maps are None (sdpa makes none)"),
        (None, TypeError, "attentions is a NoneType"),
        ("maps.pt", TypeError, "attentions is a str"),
        (["layer.0"], TypeError, "'layer.0' is a str: expected a tensor"),
        (torch.ones(2, 5, 5), headprobe.HeadprobeError, "one array [2, 5, 5]: expected [layers"),
        ([torch.ones(5, 5)], headprobe.HeadprobeError, "'layer.0' is [5, 5]: expected [batch"),
        ([UNIFORM.log()], headprobe.HeadprobeError, "negative entries (-1.6), so these are scores"),
        ([UNIFORM * 0.7], headprobe.HeadprobeError, "sum to 0.7 .. 0.7, so part of it is missing"),
        ([UNIFORM * 4], headprobe.HeadprobeError, "sum to up to 4, so this is no softmax"),
        ([NAN], headprobe.HeadprobeError, "'layer.0' has weights that are not finite"),
        (
            [UNIFORM[..., :0]],
            headprobe.HeadprobeError,
            "'layer.0' is [2, 4, 5, 0]: it has no entry",
        ),
        ([UNIFORM[:0]], headprobe.HeadprobeError, "'layer.0' is [0, 4, 5, 5]: it has no entry"),
        ([UNIFORM, UNIFORM[:1]], headprobe.HeadprobeError, "('layer.0' 2, 'layer.1' 1): expected"),
        (
            [torch.full((1, 4, 10, 5), 0.2)],
            headprobe.HeadprobeError,
            "has 10 queries and 5 keys: expected the same number in self-attention (columns of a",
        ),
        (
            [UNIFORM, torch.full((2, 4, 4, 4), 0.25)],
            headprobe.HeadprobeError,
            "'layer.1' is [4, 4], 'layer.0' is [5, 5] [queries, keys]",
        ),
    ],
)
def test_what_is_no_map_is_refused(maps, error, message):
    with pytest.raises(error) as raised:
        from_attentions(maps)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"attention_mask": torch.ones(2, 4)}, ValueError, "attention_mask is [2, 4], the maps of"),
        ({"attention_mask": torch.ones(1, 5)}, ValueError, "attention_mask is [1, 5], the maps of"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, ValueError, "attention_mask is [2, 1, 5, 5]"),
        ({"attention_mask": torch.ones(5)}, ValueError, "attention_mask is [5]: expected [batch"),
        ({"attention_mask": torch.zeros(2, 5)}, headprobe.HeadprobeError, "has no token"),
        ({"attention_mask": torch.full((2, 5), -1e9)}, ValueError, "other entries than 0 and 1"),
        ({"attention_mask": [[1, 1, 1, 1, 0]] * 2}, headprobe.HeadprobeError, "attends to padding"),
        ({"input_ids": [1, 2, 3, 4, 5]}, ValueError, "input_ids is [5]: expected [batch, positio"),
        ({"input_ids": torch.ones(3, 5).long()}, ValueError, "input_ids is [3, 5], the maps of"),
        ({"tokens": [["the", "cat"]]}, TypeError, "'tokens' is a list: expected a tensor"),
        ({"knd": "causal"}, TypeError, "'knd' is a str: expected a tensor"),
        ({"input_ids": [[1, 2], [3]]}, TypeError, "'input_ids' is a list"),
        (
            {"input_ids": [[1] * 5] * 2, "decoder_input_ids": [[1] * 5] * 2},
            headprobe.HeadprobeError,
            "say whose, as {'encoder_attentions': maps}",
        ),
        ({"token_classes": {"verbs": {3}}}, ValueError, "token class 'verbs': expected special"),
    ],
)
def test_inputs_that_do_not_fit_the_maps(inputs, error, message):
    with pytest.raises(error) as raised:
        from_attentions([UNIFORM], **inputs)
    assert message in str(raised.value)


def test_a_report_is_written_from_given_maps(tmp_path):
    _, inputs, out = outputs("bert-eager")
    found = from_attentions(out.attentions, **inputs)
    folder = headprobe.write_report(found, tmp_path / "deep" / "mine", name="mine")
    page = (folder / "report.html").read_text("utf-8")
    assert "mine" in page
    table = pd.read_csv(folder / "heads.csv")
    assert table["output_norm"].isna().all()
    np.testing.assert_allclose(table["entropy"], found.heads()["entropy"], rtol=1e-5)
    again = Profile.load(folder / "profile.safetensors")
    headprobe.write_report(again, tmp_path / "again", name="mine")
    for name in ("report.html", "heads.csv", "similarity.csv", "layers.csv", "intervals.csv"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    with pytest.raises(headprobe.HeadprobeError, match="the profile has no head"):
        headprobe.write_report(Profile(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
