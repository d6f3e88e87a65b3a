"""A model that is spread over devices and the disk gives the numbers of one that is not."""

import gc
import json
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from headprobe import cli
from headprobe.doctor import examine
from headprobe.errors import HeadprobeError
from headprobe.inputs import batch_texts, failures, load_model
from headprobe.profile import fingerprint
from tests.test_sources import TEXTS, assert_same_numbers, heads, refusal, save_gguf, tiny_llama
from tests.tiny import WORDS, save, save_bert, save_t5

ALL_ON_DISK = {"": "disk"}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Where what has no room in memory is put."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def save_llama(folder: Path) -> Path:
    return save(tiny_llama(len(WORDS)), folder)


def save_gpt2(folder: Path) -> Path:
    """One whose linear maps are called Conv1D, and whose output layer is its input table."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    config = GPT2Config(vocab_size=len(WORDS), initializer_range=0.3, **sizes, **ids)
    return save(GPT2LMHeadModel(config), folder)


SPLIT = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "lm_head": "disk",
}


@pytest.mark.parametrize(
    ("saved", "device_map"),
    [
        (save_llama, SPLIT),
        (save_llama, ALL_ON_DISK),
        (save_llama, "auto"),
        (save_bert, ALL_ON_DISK),
        (save_gpt2, ALL_ON_DISK),
        (save_t5, ALL_ON_DISK),
    ],
)
def test_numbers_and_fingerprint_are_those_of_the_model_in_memory(saved, device_map, tmp_path):
    folder = saved(tmp_path / "model")
    whole = load_model(str(folder))
    spread = load_model(str(folder), device_map=device_map)
    is_on_disk = any(weight.is_meta for weight in spread.model.parameters())
    assert is_on_disk == (device_map != "auto")  # else nothing was tried out
    found = heads(spread)
    assert_same_numbers(found, heads(whole))
    assert found["output_norm"].notna().all()
    assert fingerprint(spread.model) == fingerprint(whole.model)
    assert spread.weights_sha256 == whole.weights_sha256


def test_a_model_on_disk_passes_the_doctor(tmp_path):
    source = load_model(str(save_llama(tmp_path / "model")), device_map=ALL_ON_DISK)
    found = examine(source.model, batch_texts(TEXTS, source).batches[0])
    assert found.problems == ()
    assert found.gate_difference == 0.0


def test_where_a_model_is_kept(tmp_path):
    folder = str(save_llama(tmp_path / "model"))
    assert load_model(folder).places == ["cpu"]
    source = load_model(folder, device_map=SPLIT)
    assert source.places == ["cpu", "disk"]
    assert source.device == torch.device("cpu")


def test_what_is_put_on_the_disk_goes_with_the_model(tmp_path, temporary):
    folder = save_bert(tmp_path / "model")
    expected = heads(load_model(str(folder)))
    # Weights from a .bin are not read in place.
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    source = load_model(str(folder), device_map=ALL_ON_DISK)
    assert list(temporary.rglob("*.*"))
    assert_same_numbers(heads(source), expected)
    del source
    gc.collect()
    assert list(temporary.iterdir()) == []
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:3000])
    assert "the weights of" in refusal(str(folder), device_map=ALL_ON_DISK)
    assert list(temporary.iterdir()) == []


def test_standard_error_is_given_back(tmp_path, capsys):
    import sys

    before = sys.stderr
    file = save_gguf(tiny_llama(258), tmp_path / "tiny.gguf")
    source = load_model(str(file))
    assert sys.stderr is before
    expected = heads(source)
    assert_same_numbers(heads(load_model(str(file), device_map="auto")), expected)
    assert capsys.readouterr().err == ""


def test_the_command_line_spreads_a_model_and_says_so(tmp_path):
    folder = save_llama(tmp_path / "model")
    out = tmp_path / "report"
    command = ["analyze", str(folder), "--max-texts", "2", "--max-tokens", "8", "--out", str(out)]
    done = CliRunner().invoke(cli.main, [*command, "--device-map", "auto"])
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    settings = json.loads((out / "summary.json").read_text("utf-8"))["settings"]
    assert "meta" not in settings["device"]
    wrong = CliRunner().invoke(cli.main, [*command, "--device-map", "auto", "--device", "auto"])
    assert wrong.exit_code == 2
    assert "leave --device out" in wrong.stderr


def test_a_device_and_a_device_map_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="expected one of them"):
        load_model(str(save_llama(tmp_path / "model")), device="auto", device_map="auto")


def test_device_maps_that_do_not_fit(tmp_path, monkeypatch):
    folder = str(save_llama(tmp_path / "model"))
    assert "the weights of" in refusal(folder, device_map={"": "cuda:77"})
    monkeypatch.setattr(failures, "find_spec", lambda name: None)
    assert 'needs accelerate, not installed here: run pip install "headprobe[device-map]"' in (
        refusal(folder, device_map="auto")
    )


def test_a_model_without_weights_has_no_fingerprint():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(HeadprobeError, match="weight 'weight' has no content"):
        fingerprint(model)
