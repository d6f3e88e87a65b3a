import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from headprobe.errors import HeadprobeError
from headprobe.inputs import batch_texts, load_model, places, read_texts, sample_texts

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "the", "cat", "sat", "mat", "##s", ".", ",", "!", "##!", "+"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def bert_config(**changes) -> BertConfig:
    sizes = {"vocab_size": len(WORDS), "intermediate_size": 32, "max_position_embeddings": 12}
    return BertConfig(**{**SIZES, **sizes, **changes})


def wordpiece_tokenizer(**options) -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokens = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, **options)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*alphabet, "Ġ.", "<end>"])}
    tokenizer = Tokenizer(models.BPE(ids, [("Ġ", ".")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<unk>", "the", "cat", "sat", "."]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


@pytest.fixture
def bert_folder(tmp_path) -> Path:
    folder = tmp_path / "tiny bert"
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(folder)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    wordpiece_tokenizer(model_input_names=inputs).save_pretrained(folder)
    return folder


@pytest.fixture
def bert(bert_folder):
    return load_model(str(bert_folder))


@pytest.fixture
def gpt2(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=258, n_embd=16, n_layer=1, n_head=2, n_positions=20)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    bytes_tokenizer().save_pretrained(tmp_path / "gpt2")
    return load_model(str(tmp_path / "gpt2"))


@pytest.fixture
def t5(tmp_path):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=7, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    t5_tokenizer().save_pretrained(tmp_path / "t5")
    return load_model(str(tmp_path / "t5"))


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps(config), "utf-8")


def use_bin(folder: Path, content: object) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def refusal(folder: Path, **options) -> str:
    """The message of the error that loading the folder ends in, checked to be one line."""
    with pytest.raises(HeadprobeError) as caught:
        load_model(str(folder), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# --- models ---


def test_import_is_light():
    code = "import headprobe.inputs, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_folder(bert, bert_folder):
    assert bert.name == "tiny-bert"
    assert bert.class_name == "BertForMaskedLM"
    assert bert.revision is None
    weights = (bert_folder / "model.safetensors").read_bytes()
    assert bert.weights_sha256 == hashlib.sha256(weights).hexdigest()
    assert bert.dtype == torch.float32
    assert bert.max_positions == 12
    assert not bert.model.training


def test_default_model_is_the_original():
    source = load_model()
    assert (source.name, source.class_name) == ("minilm-l6", "BertModel")
    assert source.weights_sha256 == DEFAULT_SHA256
    assert source.max_positions == 512
    batches = batch_texts(sample_texts(), source)
    assert batches.texts == len(sample_texts())
    assert batches.max_tokens == 128
    assert batches.cut > 0


def test_default_model_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr(places, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(HeadprobeError, match=r'pip install "headprobe\[demo\]"'):
        load_model()


def test_loading_is_silent_and_leaves_settings(bert_folder, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    environment = dict(os.environ)
    load_model(str(bert_folder))
    refusal(bert_folder, device="foo")
    after = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    assert after == before
    assert dict(os.environ) == environment
    assert capfd.readouterr() == ("", "")


def test_bin_and_safetensors_give_the_same_weights(bert, bert_folder):
    expected = {name: value.clone() for name, value in bert.model.state_dict().items()}
    use_bin(bert_folder, expected)
    source = load_model(str(bert_folder))
    for name, value in source.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    content = (bert_folder / "pytorch_model.bin").read_bytes()
    assert source.weights_sha256 == hashlib.sha256(content).hexdigest()


def test_shards_are_hashed_in_the_order_of_their_names(bert, bert_folder):
    (bert_folder / "model.safetensors").unlink()
    bert.model.save_pretrained(bert_folder, max_shard_size="5KB")
    shards = sorted(bert_folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    content = b"".join(shard.read_bytes() for shard in shards)
    source = load_model(str(bert_folder))
    assert source.weights_sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("asked", "stored", "given"),
    [
        ("auto", torch.float32, torch.float32),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float32", torch.float16, torch.float32),
    ],
)
def test_dtype(bert, bert_folder, asked, stored, given):
    bert.model.to(stored).save_pretrained(bert_folder)
    source = load_model(str(bert_folder), dtype=asked)
    assert source.dtype == given
    assert {weight.dtype for weight in source.model.parameters()} == {given}


def test_unknown_dtype(bert_folder):
    with pytest.raises(ValueError, match="'int8': expected one of auto, float32"):
        load_model(str(bert_folder), dtype="int8")


@pytest.mark.parametrize("device", ["foo", "cuda:77", "meta"])
def test_unknown_device(bert_folder, device):
    message = refusal(bert_folder, device=device)
    assert f"device '{device}'" in message
    assert "cpu" in message


def test_memory_that_ran_out_is_left_to_the_caller(bert_folder, monkeypatch):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(BertForMaskedLM, "from_pretrained", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(str(bert_folder))


def test_positions_start_after_the_padding_row(tmp_path):
    config = RobertaConfig(
        **SIZES, vocab_size=15, intermediate_size=32, max_position_embeddings=12, pad_token_id=1
    )
    RobertaModel(config).save_pretrained(tmp_path)
    wordpiece_tokenizer().save_pretrained(tmp_path)
    source = load_model(str(tmp_path))
    assert source.max_positions == 10
    batches = batch_texts(["the cat sat . " * 5], source)
    assert source.model(**batches.batches[0]).last_hidden_state.shape == (1, 10, 16)


def test_limit_of_the_tokenizer_counts(bert_folder):
    wordpiece_tokenizer(model_max_length=7).save_pretrained(bert_folder)
    assert load_model(str(bert_folder)).max_positions == 7


def test_relative_positions_have_no_limit(t5):
    assert t5.max_positions is None


def test_missing_pooler_and_head_are_fine(tmp_path):
    BertModel(bert_config(), add_pooling_layer=False).save_pretrained(tmp_path)
    wordpiece_tokenizer().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).class_name == "BertModel"
    edit_config(tmp_path, architectures=["BertForSequenceClassification"])
    assert load_model(str(tmp_path)).class_name == "BertForSequenceClassification"


def test_missing_attention_weights(bert_folder):
    edit_config(bert_folder, num_hidden_layers=3)
    message = refusal(bert_folder)
    assert "lacks 16 weights of BertForMaskedLM (bert.encoder.layer.2.attention" in message
    assert "random" in message


def test_weights_of_another_shape(bert_folder):
    edit_config(bert_folder, intermediate_size=64)
    message = refusal(bert_folder)
    assert "bert.encoder.layer.0.intermediate.dense.bias" in message
    assert "[32]" in message
    assert "[64]" in message


def test_unknown_class_falls_back_to_the_type(bert_folder):
    edit_config(bert_folder, architectures=["NoSuchModel"])
    assert load_model(str(bert_folder)).class_name == "BertModel"


def test_folder_without_config(tmp_path):
    assert f"folder {str(tmp_path)!r} has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a\\b", "a/b/c"])
def test_path_that_does_not_exist(name):
    with pytest.raises(HeadprobeError, match="does not exist"):
        load_model(name)


def test_file_instead_of_folder(bert_folder):
    assert "is a file" in refusal(bert_folder / "config.json")


def test_broken_config(bert_folder):
    (bert_folder / "config.json").write_text("{nope", "utf-8")
    assert "configuration" in refusal(bert_folder)


@pytest.mark.parametrize("content", ["[1]", "{}", '{"model_type": "foo"}'])
def test_unknown_type(bert_folder, content):
    (bert_folder / "config.json").write_text(content, "utf-8")
    assert "is not known to transformers" in refusal(bert_folder)


def test_impossible_sizes(bert_folder):
    edit_config(bert_folder, hidden_size=15)
    assert "hidden size (15)" in refusal(bert_folder)


def test_no_tokenizer(bert_folder):
    for path in bert_folder.glob("*token*"):
        path.unlink()
    assert "has no tokenizer" in refusal(bert_folder)


def test_no_weights(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    assert "no file named model.safetensors" in refusal(bert_folder)


def test_damaged_safetensors(bert_folder):
    path = bert_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    assert "the weights of" in refusal(bert_folder)


def test_truncated_bin(bert, bert_folder):
    path = use_bin(bert_folder, bert.model.state_dict())
    path.write_bytes(path.read_bytes()[:3000])
    assert "the weights of" in refusal(bert_folder)


class Trap:
    """Pickled, it makes a folder when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("bare", [False, True])
def test_pickled_code_is_not_executed(bert_folder, tmp_path, bare):
    trap = Trap(tmp_path / "sprung")
    path = use_bin(bert_folder, {"weight": trap})
    if bare:
        path.write_bytes(pickle.dumps(trap))
    assert "not plain tensors" in refusal(bert_folder)
    assert not trap.path.exists()


@pytest.fixture
def own_code_folder(bert_folder, monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (bert_folder / "own.py").write_text(
        "from transformers import BertConfig, BertForMaskedLM\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class OwnModel(BertForMaskedLM):\n    config_class = OwnConfig\n",
        "utf-8",
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForMaskedLM": "own.OwnModel"}
    edit_config(bert_folder, model_type="own", architectures=["OwnModel"], auto_map=auto_map)
    return bert_folder


def test_own_code_is_run_only_when_trusted(own_code_folder):
    assert "--trust-remote-code" in refusal(own_code_folder)
    source = load_model(str(own_code_folder), trust_remote_code=True)
    assert source.class_name == "OwnModel"


def test_own_model_of_a_known_type_is_not_replaced(own_code_folder):
    edit_config(own_code_folder, model_type="bert")
    assert "--trust-remote-code" in refusal(own_code_folder)


def test_no_network_is_told_at_once(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    with pytest.raises(HeadprobeError, match=r"'no/such-model' is no folder.*can't be reached"):
        load_model("no/such-model")


def test_impossible_hub_name():
    with pytest.raises(HeadprobeError, match="expected OWNER/NAME"):
        load_model("what is this?")


# --- texts ---


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "texts.txt"
    path.write_bytes(content)
    return path


def test_sample_texts():
    texts = sample_texts()
    assert len(texts) >= 70
    assert all(text == text.strip() != "" for text in texts)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_and_paragraphs(tmp_path, encoding, newline):
    lines = ["", "Das Mädchen", "  läuft. ", " \t", "", "你好\f。"]
    path = write(tmp_path, newline.join(lines).encode(encoding))
    assert read_texts(path) == ["Das Mädchen", "läuft.", "你好\f。"]
    assert read_texts(str(path), paragraphs=True) == ["Das Mädchen läuft.", "你好\f。"]


def test_standard_input(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO("eins\nzwei ö\n".encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_texts("-") == ["eins", "zwei ö"]


def test_blank_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n \n")))
    with pytest.raises(HeadprobeError, match="standard input has no text"):
        read_texts("-")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no text in it"),
        (b" \n\r\n\t\n", "has no text in it"),
        (b"abc\0def\n", "NUL bytes"),
        (b"good\n\xff\xfe\x80", "byte 5 is not UTF-8"),
        (b"\xff\xfea", "is not text: save it as UTF-8"),
    ],
)
@pytest.mark.parametrize("paragraphs", [False, True])
def test_files_that_are_no_texts(tmp_path, content, message, paragraphs):
    with pytest.raises(HeadprobeError, match=message):
        read_texts(write(tmp_path, content), paragraphs=paragraphs)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(HeadprobeError, match="does not exist"):
        read_texts(tmp_path / "none.txt")
    with pytest.raises(HeadprobeError, match="is a folder"):
        read_texts(tmp_path)


# --- batches ---


def test_batches_keep_order_and_pad_on_the_right(bert):
    bert.tokenizer.padding_side = "left"
    made = batch_texts(["the cat sat .", "cats", "the mat"], bert, batch_size=2)
    first, second = made.batches
    assert first["input_ids"].tolist() == [[2, 5, 6, 7, 10, 3], [2, 6, 9, 3, 0, 0]]
    assert first["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]
    assert first["token_type_ids"].tolist() == [[0] * 6] * 2
    assert second["input_ids"].tolist() == [[2, 5, 8, 3]]
    assert {value.dtype for value in first.values()} == {torch.int64}
    assert (made.texts, made.tokens, made.cut, made.skipped) == (3, 14, 0, 0)
    bert.model(**first)


def test_texts_are_cut_at_max_tokens_and_at_the_last_position(bert):
    texts = ["the cat sat", "the cat sat on the mat", "the " * 30]
    made = batch_texts(texts, bert, max_tokens=5)
    assert (made.max_tokens, made.cut, made.tokens) == (5, 2, 15)
    assert made.batches[0]["input_ids"][:, -1].tolist() == [3, 3, 3]
    made = batch_texts(texts, bert, max_tokens=100)
    assert (made.max_tokens, made.cut) == (12, 1)


def test_texts_without_tokens_are_skipped(bert, gpt2):
    for source in (bert, gpt2):
        made = batch_texts(["", "cat", "sat"], source)
        assert (made.texts, made.skipped) == (2, 1)
        assert made.texts_hash == batch_texts(["cat", "sat"], source).texts_hash
        with pytest.raises(HeadprobeError, match="none of the 2 texts has a token"):
            batch_texts(["", ""], source)
        with pytest.raises(HeadprobeError, match="none of the 0 texts has a token"):
            batch_texts([], source)


def test_no_pad_token(gpt2):
    size = len(gpt2.tokenizer)
    made = batch_texts(["ab", "abc ."], gpt2)
    batch = made.batches[0]
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["input_ids"][0, 2:].tolist() == [gpt2.tokenizer.eos_token_id] * 2
    assert (gpt2.tokenizer.pad_token, len(gpt2.tokenizer)) == (None, size)
    alone = gpt2.model(**batch_texts(["ab"], gpt2).batches[0]).logits
    torch.testing.assert_close(gpt2.model(**batch).logits[:1, :2], alone, rtol=0, atol=2e-6)


def test_decoder_gets_the_text_shifted_right(t5):
    made = batch_texts(["the cat sat .", "cat"], t5)
    batch = made.batches[0]
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 1], [4, 1, 0, 0, 0]]
    assert batch["decoder_input_ids"].tolist() == [[0, 3, 4, 5, 6], [0, 4, 0, 0, 0]]
    assert batch["decoder_attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert made.max_tokens == 128
    t5.model(**batch)


def test_no_two_inputs_share_memory(t5):
    # Encoder and decoder are told apart by which tensor their ids come from.
    for batch in batch_texts(["the cat sat .", "cat", "sat"], t5, batch_size=2).batches:
        assert len({value.untyped_storage().data_ptr() for value in batch.values()}) == len(batch)


def test_decoder_start_of_the_configuration(t5):
    t5.model.config.decoder_start_token_id = 2
    assert batch_texts(["cat"], t5).batches[0]["decoder_input_ids"].tolist() == [[2, 4]]


def test_model_without_mask_gets_one_text_at_a_time(bert, monkeypatch):
    monkeypatch.setattr(bert.model, "forward", lambda input_ids: input_ids)
    made = batch_texts(["cat", "the cat"], bert)
    assert [list(batch) for batch in made.batches] == [["input_ids"]] * 2
    assert [batch["input_ids"].shape for batch in made.batches] == [(1, 3), (1, 4)]


def test_wrapped_forward_gets_the_mask(bert, monkeypatch):
    monkeypatch.setattr(bert.model, "forward", lambda *args, **kwargs: None)
    assert batch_texts(["cat"], bert).batches[0].keys() == {"input_ids", "attention_mask"}


def test_token_classes(bert):
    classes = batch_texts(["the cat , sat. cat! ?"], bert).token_classes
    assert classes["special"] == {0, 1, 2, 3, 4}
    assert classes["punctuation"] == {WORDS.index(word) for word in [".", ",", "!"]}
    assert WORDS.index("+") in batch_texts(["+"], bert).token_classes["punctuation"]


def test_punctuation_of_bytes(gpt2):
    made = batch_texts(["a . b,", "你 é $"], gpt2)
    tokens = gpt2.tokenizer.convert_ids_to_tokens(sorted(made.token_classes["punctuation"]))
    assert set(tokens) == {"Ġ.", ",", "$"}
    assert made.token_classes["special"] == {gpt2.tokenizer.eos_token_id}


def test_hash_tells_texts_apart(bert):
    hashes = {
        batch_texts(texts, bert).texts_hash
        for texts in (["cat sat"], ["cat", "sat"], ["sat", "cat"], ["cat sat", "sat"])
    }
    assert len(hashes) == 4
    assert batch_texts(["cat"], bert).texts_hash == hashlib.sha256(b"cat\0").hexdigest()


def test_tokenizer_of_another_model(bert, tmp_path, bert_folder):
    folder = tmp_path / "small vocabulary"
    shutil.copytree(bert_folder, folder)
    BertForMaskedLM(bert_config(vocab_size=8)).save_pretrained(folder)
    with pytest.raises(HeadprobeError, match="token id 10, its model only ids below 8"):
        batch_texts(["cat ."], load_model(str(folder)))


def test_wrong_arguments(bert):
    with pytest.raises(TypeError, match="expected a list of strings"):
        batch_texts("cat", bert)
    with pytest.raises(ValueError, match="batch_size is 0"):
        batch_texts(["cat"], bert, batch_size=0)
    with pytest.raises(ValueError, match="max_tokens is 2: expected 3 or more"):
        batch_texts(["cat"], bert, max_tokens=2)
