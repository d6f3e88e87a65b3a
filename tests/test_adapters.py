"""Adapters: the numbers of a merged one, and what an adapter that is not merged leaves out."""

import hashlib
import json
from pathlib import Path

import pandas as pd
import peft
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, BertModel

import headprobe
from headprobe import cli
from headprobe.inputs import Parts, failures, load_model
from tests.test_inputs import Trap
from tests.test_sources import TEXTS, assert_same_numbers, heads, refusal, tiny_llama
from tests.tiny import WORDS, save, save_bert, word_tokenizer

# What peft and transformers say of each other while an adapter is made; loading is checked below.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

ON_ALL = ["q_proj", "v_proj", "o_proj"]


@pytest.fixture
def base(tmp_path):
    return save(tiny_llama(len(WORDS)), tmp_path / "base")


def with_adapter(base: Path, config: peft.PeftConfig) -> peft.PeftModel:
    torch.manual_seed(1)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()


def lora(**changes) -> peft.LoraConfig:
    """One that is not the start of a training, where an adapter adds nothing."""
    options = {"r": 4, "target_modules": ON_ALL, "init_lora_weights": False}
    return peft.LoraConfig(**{**options, **changes})


@pytest.fixture
def adapter(base, tmp_path):
    with_adapter(base, lora(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "my adapter")
    return tmp_path / "my adapter"


@pytest.fixture
def merged_by_hand(base, adapter, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    both = peft.PeftModel.from_pretrained(model, adapter)
    return save(both.merge_and_unload(), tmp_path / "merged")


def edit(adapter: Path, **changes) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def test_a_merged_adapter_gives_the_numbers_of_the_model_merged_by_hand(
    base, adapter, merged_by_hand
):
    source = load_model(str(adapter))
    assert (source.name, source.class_name) == ("my-adapter", "LlamaForCausalLM")
    assert (source.revision, source.weights_sha256) == (None, None)
    weights = adapter / "adapter_model.safetensors"
    assert source.made_of["adapter"] == {
        "name": "my-adapter",
        "kind": "LORA",
        "merged": True,
        "revision": None,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    assert source.made_of["base"] == {
        "name": "base",
        "revision": None,
        "weights_sha256": load_model(str(base)).weights_sha256,
    }
    found = heads(source)
    assert_same_numbers(found, heads(load_model(str(merged_by_hand))))
    assert found["output_norm"].notna().all()
    assert not found["entropy"].equals(heads(load_model(str(base)))["entropy"])


def test_the_summary_says_what_was_merged(adapter, base, tmp_path):
    out = tmp_path / "report"
    command = ["analyze", str(adapter), "--max-texts", "2", "--max-tokens", "8", "--out", str(out)]
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    model = json.loads((out / "summary.json").read_text("utf-8"))["model"]
    assert model["adapter"]["kind"] == "LORA"
    assert model["adapter"]["merged"] is True
    assert model["base"]["name"] == "base"


def test_the_base_can_be_named(base, adapter, merged_by_hand, tmp_path):
    base.rename(tmp_path / "moved")
    assert "needs its base model, which --base may name: folder" in refusal(str(adapter))
    source = load_model(Parts(str(adapter), base=str(tmp_path / "moved")))
    assert_same_numbers(heads(source), heads(load_model(str(merged_by_hand))))
    edit(adapter, base_model_name_or_path=None)
    assert "names no base model: name it by --base" in refusal(str(adapter))


def test_an_adapter_with_the_config_of_its_base_is_an_adapter(base, adapter):
    found = heads(load_model(str(adapter)))
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    assert_same_numbers(heads(load_model(str(adapter))), found)


def test_the_tokenizer_of_the_adapter_comes_first(base, adapter):
    for path in base.glob("*token*"):
        path.unlink()
    assert "or name another by --tokenizer" in refusal(str(adapter))
    word_tokenizer().save_pretrained(adapter)
    assert len(heads(load_model(str(adapter)))) == 8


def test_adapters_as_bin_are_read_and_their_code_is_not_run(adapter, tmp_path):
    expected = heads(load_model(str(adapter)))
    path = adapter / "adapter_model.safetensors"
    weights = peft.utils.load_peft_weights(str(adapter), device="cpu")
    path.unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    assert_same_numbers(heads(load_model(str(adapter))), expected)
    trap = Trap(tmp_path / "sprung")
    torch.save({"weight": trap}, adapter / "adapter_model.bin")
    assert "not plain tensors" in refusal(str(adapter))
    assert not trap.path.exists()


def test_adapters_that_can_not_be_read(adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    assert "the adapter of" in refusal(str(adapter))
    path.unlink()
    assert "has no adapter_model.safetensors or adapter_model.bin" in refusal(str(adapter))
    (adapter / "adapter_config.json").write_text("{nope", "utf-8")
    assert "is not JSON" in refusal(str(adapter))


def test_an_adapter_for_more_layers_does_not_fit(base, adapter):
    weights = peft.utils.load_peft_weights(str(adapter), device="cpu")
    more = {name.replace("layers.1", "layers.7"): weight for name, weight in weights.items()}
    torch.save(more, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    message = refusal(str(adapter))
    assert "does not fit its base model: 6 of its weights have no place there and 6 are" in message


def test_an_adapter_of_another_size_or_kind_of_model_does_not_fit(base, adapter, tmp_path):
    edit(adapter, r=2)
    assert "size mismatch" in refusal(str(adapter))
    other = save_bert(tmp_path / "bert")
    assert "Target modules" in refusal(Parts(str(adapter), base=str(other)))


def test_a_trained_head_that_the_base_has_not_is_left_out(tmp_path):
    base = save_bert(tmp_path / "bert")
    config = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    torch.manual_seed(0)
    both = peft.get_peft_model(BertModel.from_pretrained(base), config)
    both.save_pretrained(tmp_path / "adapter")
    expected = heads(load_model(str(tmp_path / "adapter")))
    weights = peft.utils.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    head = {"base_model.model.classifier.weight": torch.ones(2, 16)}
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(weights | head, tmp_path / "adapter" / "adapter_model.bin")
    assert "1 of its weights have no place" in refusal(str(tmp_path / "adapter"))
    edit(tmp_path / "adapter", modules_to_save=["classifier"])
    assert_same_numbers(heads(load_model(str(tmp_path / "adapter"))), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "no tokens"),
        (lora(alora_invocation_tokens=[3], task_type="CAUSAL_LM"), "can't be merged into its base"),
    ],
    ids=["prompt", "activated"],
)
def test_adapters_that_can_not_be_merged(base, tmp_path, config, message):
    with_adapter(base, config).save_pretrained(tmp_path / "adapter")
    assert message in refusal(str(tmp_path / "adapter"))


def test_base_without_an_adapter(base):
    assert "is for an adapter" in refusal(Parts(str(base), base="elsewhere"))


def test_adapters_without_peft_name_the_extra(adapter, monkeypatch):
    monkeypatch.setattr(failures, "find_spec", lambda name: None)
    assert 'needs peft, not installed here: run pip install "headprobe[peft]"' in refusal(
        str(adapter)
    )


# --- adapters that are not merged ---

# What lies between attention and residual stream in these need not look like two linear maps.
KINDS = {
    "lora": lora(),
    "dora": lora(use_dora=True),
    "scaled outputs": peft.IA3Config(
        target_modules=ON_ALL, feedforward_modules=[], init_ia3_weights=False
    ),
    "scaled inputs": peft.IA3Config(
        target_modules=ON_ALL, feedforward_modules=["o_proj"], init_ia3_weights=False
    ),
    "circular convolution": peft.C3AConfig(block_size=16, target_modules=["q_proj", "o_proj"]),
    "rotation": peft.OFTConfig(oft_block_size=4, target_modules=ON_ALL, init_weights=False),
    "reflection": peft.HRAConfig(r=4, target_modules=ON_ALL, init_weights=False),
    "Hadamard": peft.LoHaConfig(r=4, target_modules=ON_ALL, init_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_is_not_merged_gives_equal_numbers_or_none(base, kind):
    source = load_model(str(base))
    source_merged = load_model(str(base))
    torch.manual_seed(1)
    both = peft.get_peft_model(source.model, KINDS[kind]).eval()
    torch.manual_seed(1)
    merged = peft.get_peft_model(source_merged.model, KINDS[kind]).merge_and_unload()
    found = headprobe.profile(both, batches(source)).heads()
    expected = headprobe.profile(merged, batches(source)).heads()
    if found["output_norm"].isna().all():
        expected["output_norm"] = found["output_norm"]
    pd.testing.assert_frame_equal(
        found.drop(columns="site"), expected.drop(columns="site"), rtol=0, atol=2e-5
    )


def batches(source):
    from headprobe.inputs import batch_texts

    return batch_texts(TEXTS, source).batches


def test_an_adapter_on_the_output_projection_says_why_there_is_no_norm(base):
    found = headprobe.profile(with_adapter(base, lora()), batches(load_model(str(base))))
    assert found.heads()["output_norm"].isna().all()
    assert {layer.no_projection for layer in found.measured} == {
        "its linear map carries an adapter: merge that first (merge_and_unload)"
    }


def test_an_adapter_beside_the_output_projection_takes_nothing_away(base):
    config = lora(target_modules=["q_proj", "v_proj"])
    found = headprobe.profile(with_adapter(base, config), batches(load_model(str(base))))
    assert found.heads()["output_norm"].notna().all()
