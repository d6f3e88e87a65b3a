"""What people give that is broken, empty or odd: the right figures, or a sentence that says why.

Cases that tests/test_cli.py, tests/test_inputs.py and tests/test_profile.py have are not repeated.
"""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file, save_file
from torch import nn

import headprobe
from headprobe import HeadprobeError
from headprobe.cli import main
from headprobe.profile import Sampling, profile
from tests.models import ids, make
from tests.tiny import save_bert

NAN, INF = float("nan"), float("inf")
NOT_FINITE = (
    "its weights are not finite: a row whose keys are all masked, an overflow (of float16: use "
    "bfloat16 or float32), or broken parameters"
)


def same_heads(one, other):
    assert_frame_equal(one.heads(), other.heads(), check_exact=False, atol=2e-6, rtol=0)


# --- broken parameters: a NaN becomes no number and no empty cell without a reason ---


def broken(name, parameter, value, index=...):
    """A model of tests/models.py with one entry of one parameter replaced, and its inputs."""
    model, inputs = make(name)
    with torch.no_grad():
        model.get_parameter(parameter)[index] = value
    return model, inputs


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("query", NOT_FINITE),
        ("key", NOT_FINITE),
        ("value", "its values or its output are not finite: broken parameters, or an overflow"),
    ],
)
def test_a_layer_of_broken_parameters_is_left_out_with_the_reason(
    implementation, value, part, reason
):
    site = "encoder.layer.1.attention.self"
    model, inputs = broken(f"bert-{implementation}", f"{site}.{part}.weight", value, (0, 0))
    result = profile(model, [inputs])
    assert result.left_out == {site: reason}
    assert set(result.heads()["layer"]) == {0}
    assert result.heads()["entropy"].notna().all()


def test_a_broken_embedding_leaves_no_layer():
    model, inputs = make("bert-eager")
    with torch.no_grad():
        model.get_input_embeddings().weight[inputs["input_ids"][0, 0]] = NAN
    result = profile(model, [inputs])
    assert result.measured == ()
    assert list(result.left_out.values()) == [NOT_FINITE] * 2


def test_a_broken_output_projection_takes_the_norm_with_it_and_says_so():
    model, inputs = broken("bert-eager", "encoder.layer.1.attention.output.dense.weight", NAN, 0)
    result = profile(model, [inputs])
    assert result.heads()["output_norm"].notna().tolist() == [True] * 4 + [False] * 4
    reasons = [layer.no_projection for layer in result.measured]
    assert reasons == ["", "W_O has entries that are not finite: broken parameters"]
    assert "output_norm" not in set(result.intervals().query("layer == 1")["statistic"])


def test_a_broken_row_is_found_whether_or_not_it_is_sampled():
    model, _ = make("cross")
    for row in range(60, 70):  # of each hundred rows 16 are sampled
        query = torch.randn(1, 100, 32)
        query[0, row] = NAN
        found = profile(model, [{"query": query, "key": torch.randn(1, 9, 32)}])
        assert found.left_out == {"attn": NOT_FINITE}
        assert found.measured == ()
        assert found.pair_sums == {}


def test_values_that_overflow_in_half_precision_are_left_out():
    model, inputs = make("bert-eager")
    with torch.no_grad():
        model.encoder.layer[0].attention.self.value.weight.mul_(1e6)
    result = profile(model.half(), [inputs])
    assert "not finite" in result.left_out["encoder.layer.0.attention.self"]


def test_half_precision_is_close_to_full():
    model, inputs = make("bert-eager")
    full = profile(model, [inputs]).heads()
    half = profile(model.half(), [inputs]).heads()
    pd.testing.assert_series_equal(half["entropy"], full["entropy"], atol=5e-3, rtol=0)


# --- batches ---


BATCH = ids()
ONES = torch.ones(2, 9)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": torch.zeros(0, 9).long()}, ValueError, "is [0, 9]: the batch has no text"),
        ({"input_ids": torch.zeros(2, 0).long(), "attention_mask": None}, HeadprobeError, "token"),
        ({"input_ids": [[1, 2, 3]]}, ValueError, "a batch has 'input_ids', 'attention_mask': exp"),
        ({"input_ids": torch.ones(9).long()}, ValueError, "expected a tensor [batch, positions"),
        ({"attention_mask": torch.ones(2, 8)}, ValueError, "attention_mask is [2, 8], input_ids"),
        ({"attention_mask": torch.ones(9)}, ValueError, "attention_mask is [9], input_ids is [2"),
        ({"attention_mask": ONES * 0}, HeadprobeError, "text 0 of a batch has no token in 'input_"),
        ({"attention_mask": -1e9 * (1 - ONES) - 1}, ValueError, "not what is added to scores"),
        ({"attention_mask": ONES * NAN}, ValueError, "attention_mask has negative entries or NaN"),
        ({"attention_mask": ONES.tolist()}, TypeError, "attention_mask is a list: expected a ten"),
        ({"attention_mask": ONES.numpy()}, TypeError, "attention_mask is a ndarray: expected a te"),
    ],
)
def test_batches_that_are_refused(change, error, message):
    model, _ = make("bert-eager")
    with pytest.raises(error) as raised:
        profile(model, [{**BATCH, **change}])
    assert message in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["bert-eager", "gpt2-sdpa"])
def test_the_type_of_the_mask_changes_nothing(name, dtype):
    model, inputs = make(name)
    typed = inputs | {"attention_mask": inputs["attention_mask"].to(dtype)}
    same_heads(profile(model, [typed]), profile(model, [inputs]))


def test_a_hole_in_the_mask_is_no_key_and_no_query():
    model, inputs = make("bert-eager")
    holed = {name: value.clone() for name, value in inputs.items()}
    holed["attention_mask"][:] = 1
    holed["attention_mask"][0, 3:5] = 0
    expected = profile(model, [holed]).heads()
    holed["input_ids"][0, 3:5] = 7  # what is in the hole doesn't matter
    assert_frame_equal(profile(model, [holed]).heads(), expected)
    assert profile(model, [holed]).tokens == 16


def test_tensors_that_are_not_contiguous():
    model, inputs = make("bert-eager")
    turned = {name: value.t().contiguous().t() for name, value in inputs.items()}
    assert not turned["input_ids"].is_contiguous()
    same_heads(profile(model, [turned]), profile(model, [inputs]))


def test_a_generator_of_batches_and_one_that_is_used_up():
    model, inputs = make("bert-eager")
    batches = (batch for batch in [inputs, inputs])
    assert profile(model, batches).texts == 4
    empty = profile(model, batches)
    assert (empty.texts, len(empty.heads()), len(empty.pairs())) == (0, 0, 0)
    with pytest.raises(HeadprobeError, match="the profile has no head"):
        headprobe.write_report(empty, "nowhere")


def test_one_text_of_one_token():
    model, _ = make("gpt2-eager")
    heads = profile(model, [{"input_ids": torch.tensor([[5]])}]).heads()
    assert heads["entropy"].tolist() == [0.0] * 8
    unmeasured = ["entropy_normalized", "distance_ratio", "previous", "next", "nearest_similarity"]
    assert heads[unmeasured].isna().all(axis=None)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.full((2, 9), 60), IndexError, "index out of range"),
        (torch.full((2, 9), -1), IndexError, "index out of range"),
        (torch.rand(2, 9), RuntimeError, "scalar types: Long, Int"),
    ],
)
def test_what_the_model_refuses_is_its_own_error_and_leaves_it_as_it_was(tokens, error, message):
    model, inputs = make("bert-eager")
    expected = profile(model, [inputs])
    model.train()
    with pytest.raises(error, match=message):
        profile(model, [inputs, inputs | {"input_ids": tokens}])
    assert all(module.training for module in model.modules())
    same_heads(profile(model, [inputs]), expected)


@pytest.mark.parametrize("error", [KeyError("midway"), KeyboardInterrupt()])
def test_a_module_that_raises_midway_leaves_the_model_as_it_was(error):
    model, inputs = make("bert-eager")
    model.train()
    model.encoder.layer[1].eval()

    def state():
        return [(m.training, list(m._forward_hooks), list(m._forward_pre_hooks)) for m in modules]

    def fail(*args):
        raise error

    handle = model.encoder.layer[1].register_forward_hook(fail)
    modules = list(model.modules())
    before = state()
    with pytest.raises(type(error)):
        profile(model, [inputs])
    assert state() == before
    handle.remove()
    assert len(profile(model, [inputs]).heads()) == 8


# --- models and options ---


class NoParameters(nn.Module):
    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(dim=-1) @ x


def test_a_model_without_parameters_is_measured():
    x = torch.rand(2, 5, 4)
    heads = profile(NoParameters(), [{"x": x}]).heads()
    weights = (x @ x.transpose(1, 2)).softmax(dim=-1)
    expected = float(-(weights * weights.log()).sum(-1).mean())
    assert heads["entropy"].tolist() == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize("model", [lambda input_ids: input_ids, "bert-base-uncased", None])
def test_a_model_that_is_no_module(model):
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        profile(model, [BATCH])


def test_a_model_that_does_not_attend():
    with pytest.raises(headprobe.NoAttentionError, match="no softmax attention was seen"):
        profile(nn.Linear(4, 4), [{"input": torch.rand(2, 5, 4)}])


@pytest.mark.parametrize(
    ("gates", "error", "message"),
    [
        ({"encoder.layer.0.attention.self": torch.ones(3)}, ValueError, "has 3 entries, that la"),
        (
            {"encoder.layer.9": torch.ones(4)},
            HeadprobeError,
            "'encoder.layer.9' were never applied",
        ),
    ],
)
def test_gates_that_are_refused(gates, error, message):
    model, inputs = make("bert-eager")
    expected = model(**inputs)[0]
    with pytest.raises(error) as raised, headprobe.Capture(model, gates=gates):
        model(**inputs)
    assert message in str(raised.value)
    assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 1.5}, "rows is 1.5: expected 1 or more"),
        ({"rows_across": -1}, "rows_across is -1: expected 1 or more"),
        ({"pairs": -1}, "pairs is -1: expected a whole number, 0 or more"),
        ({"seed": -1}, "seed is -1: expected a whole number, 0 or more"),
        ({"seed": "a"}, "seed is a: expected a whole number, 0 or more"),
    ],
)
def test_samplings_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_token_classes_of_words_and_of_no_id():
    model, inputs = make("bert-eager")
    with pytest.raises(TypeError, match=r"token class 'special' has '.*': expected token ids"):
        profile(model, [inputs], token_classes={"special": ["[CLS]"]})
    heads = profile(model, [inputs], token_classes={"special": []}).heads()
    assert heads["special"].isna().all()


@pytest.mark.parametrize("similarity", [0, -1, 2, NAN])
def test_a_similarity_that_is_none(similarity, tmp_path):
    model, inputs = make("bert-eager")
    result = profile(model, [inputs])
    with pytest.raises(ValueError, match="expected a number above 0, at most 1"):
        headprobe.write_report(result, tmp_path / "out", similarity=similarity)
    assert list(tmp_path.iterdir()) == []


# --- the command line ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models with spaces") / "tiny bert")


@pytest.fixture
def inside(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "texts.txt").write_text("the cat sat on the mat .\nthe dog ran\n", "utf-8")
    monkeypatch.chdir(folder)
    return folder


def run(model, *options, code=0):
    result = CliRunner().invoke(main, ["analyze", str(model), *map(str, options)])
    assert result.exit_code == code, result.output
    if code == 1:
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1  # one sentence, no traceback
    return result.stdout if code == 0 else result.stderr


TEXTS = {
    "one token": ("the", 1, 2),
    "special tokens": ("</s> </s>\n<pad>", 2, 5),
    "punctuation": (". , .\n,", 2, 6),
    "emoji": ("\N{GRINNING FACE} \N{GRINNING FACE}\n\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}", 2, 7),
    "control characters": ("\x01\x02 \x07 the\x1b[31m cat", 1, 7),
    "a zero-width space": ("\N{ZERO WIDTH SPACE}\nthe cat", 2, 5),
    "a line of a megabyte": ("the cat sat " * 90_000, 1, 128),
    "UTF-16": ("the cat".encode("utf-16"), 1, 3),
    "carriage returns": ("the cat\rthe dog ran\r", 2, 7),
    "no line end": ("the\n\n\n  cat", 2, 4),
}


@pytest.mark.parametrize("name", TEXTS)
def test_odd_texts_are_measured(name, bert, inside):
    content, texts, tokens = TEXTS[name]
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    (inside / "odd.txt").write_bytes(data)
    run(bert, "--text", "odd.txt", "--out", "out")
    counted = json.loads((inside / "out" / "summary.json").read_text("utf-8"))["texts"]
    assert (counted["texts"], counted["tokens"]) == (texts, tokens)
    assert pd.read_csv(inside / "out" / "heads.csv")["entropy"].notna().all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"  \n \t \n", "has no text in it: expected at least one line of text"),
        (b"\xef\xbb\xbf", "has no text in it"),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"), "(byte 3 is not UTF-8)"),
        ("the cat".encode("utf-16-le"), "is not text (it has NUL bytes): expected UTF-8 text"),
    ],
)
def test_texts_that_are_none(content, message, bert, inside):
    (inside / "odd.txt").write_bytes(content)
    assert message in run(bert, "--text", "odd.txt", "--out", "out", code=1)
    assert not (inside / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "."], "text file '.' is a folder: name a file inside it"),
        (["--out", "foreign"], "isn't empty and holds no earlier headprobe run; choose another"),
        (["--out", "link"], "is a symbolic link, and replacing it could lose what it points to"),
        (["--out", "."], "can't be replaced as a whole"),
        (["--out", "n" * 300], "can't be written (File name too long)"),
        (["--device", ""], "device '' is unknown or not available"),
    ],
)
def test_options_that_are_refused(options, message, bert, inside):
    (inside / "foreign").mkdir()
    (inside / "foreign" / "mine.txt").write_text("mine")
    (inside / "link").symlink_to(inside / "foreign")
    before = sorted(path.name for path in inside.rglob("*"))
    assert message in run(bert, "--text", "texts.txt", *options, code=1)
    assert sorted(path.name for path in inside.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--similarity", "0"], "0.0 is not in the range"),
        (["--similarity", "inf"], "inf is not in the range"),
        (["--max-texts", "0"], "0 is not in the range"),
        (["--max-tokens", "-3"], "-3 is not in the range"),
    ],
)
def test_numbers_out_of_range_are_wrong_usage(options, message, bert, inside):
    assert message in run(bert, *options, code=2)


def change_weight(name, value, index=...):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        weights[name][index] = value
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def change_config(**entries):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | entries), "utf-8")

    return change


def overwrite(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (overwrite("config.json", b""), "the configuration of"),
        (overwrite("config.json", b"\xff\xfe\0"), "is not a valid JSON file"),
        (overwrite("config.json", b"[]"), "is not known to transformers"),
        (overwrite("model.safetensors", b""), "header too small"),
        (overwrite("model.safetensors", bytes(1000)), "the weights of"),
        (overwrite("tokenizer_config.json", b"{"), "the tokenizer of"),
        (change_config(num_attention_heads=3), "is not a multiple of the number of attention"),
        (change_config(num_attention_heads=0), "can't be loaded"),
        (change_config(num_hidden_layers=0), "no softmax attention was seen"),
        (change_config(num_hidden_layers=5), "so its attention would be random"),
        (change_config(vocab_size=4), "the two files don't belong together"),
        (
            change_weight("embeddings.word_embeddings.weight", NAN),
            f"in 'encoder.layer.0.attention.self', {NOT_FINITE}",
        ),
        (
            change_weight("encoder.layer.0.attention.self.query.weight", INF),
            f"in 'encoder.layer.0.attention.self', {NOT_FINITE}",
        ),
    ],
)
def test_models_that_are_refused(change, message, bert, inside):
    folder = inside / "broken"
    shutil.copytree(bert, folder)
    change(folder)
    assert message in run(folder, "--text", "texts.txt", "--out", "out", code=1)
    assert not (inside / "out").exists()


def test_a_layer_that_is_left_out_is_told_on_the_terminal_and_in_the_summary(bert, inside):
    folder = inside / "broken"
    shutil.copytree(bert, folder)
    change_weight("encoder.layer.1.attention.self.key.weight", NAN, 0)(folder)
    said = run(folder, "--text", "texts.txt", "--out", "out")
    assert f"Left out: encoder.layer.1.attention.self: {NOT_FINITE}." in said
    summary = json.loads((inside / "out" / "summary.json").read_text("utf-8"))
    left = [{"site": "encoder.layer.1.attention.self", "reason": NOT_FINITE}]
    assert summary["left_out"] == left
    assert set(pd.read_csv(inside / "out" / "heads.csv")["layer"]) == {0}


def test_half_precision_on_the_processor(bert, inside):
    run(bert, "--text", "texts.txt", "--dtype", "float16", "--out", "half")
    run(bert, "--text", "texts.txt", "--out", "full")
    half, full = (pd.read_csv(inside / name / "heads.csv") for name in ("half", "full"))
    pd.testing.assert_series_equal(half["entropy"], full["entropy"], atol=1e-2, rtol=0)


def test_a_name_with_spaces_is_one_folder(bert, inside):
    run(bert, "--text", "texts.txt")
    assert (inside / "reports" / "tiny-bert" / "report.html").is_file()


def test_a_name_that_is_no_folder_and_no_hub_name(inside):
    assert "'a b c' is no folder and can't be a hub name" in run("a b c", code=1)
