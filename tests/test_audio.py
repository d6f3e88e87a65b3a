"""headprobe analyze on sound: WAV files of every width, the embedded ones, what is refused."""

import json
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.io import wavfile

from headprobe.inputs import Choice, batch_inputs, load_model, read_sounds, sample_sounds
from headprobe.inputs.audio import Sound, resampled
from tests.media import HEARING, save_media
from tests.test_cli import done, refusal
from tests.tiny import save_bert

RATE = 16_000


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> the folder of a saved model, made once."""
    folder, saved = tmp_path_factory.mktemp("hearing"), {}

    def saved_as(name):
        if name not in saved:
            saved[name] = save_media(name, folder / name)
        return saved[name]

    return saved_as


def tone(seconds=0.5, rate=RATE, pitch=440):
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


@pytest.fixture(scope="session")
def sounds(tmp_path_factory):
    """Three sounds of two lengths, and a file that is none."""
    folder = tmp_path_factory.mktemp("sounds")
    for number, (seconds, pitch) in enumerate([(0.5, 220), (0.5, 440), (0.8, 330)]):
        samples = (tone(seconds, pitch=pitch) * 2**15).astype(np.int16)
        wavfile.write(folder / f"{number}.wav", RATE, samples)
    (folder / "notes.txt").write_text("not a sound")
    return folder


def summary(folder):
    return json.loads((folder / "summary.json").read_text("utf-8"))


def heads(folder):
    return pd.read_csv(folder / "heads.csv", keep_default_na=False, na_values=[""])


@pytest.mark.parametrize("name", HEARING)
def test_embedded_sounds(name, models, tmp_path):
    said = done(models(name), "--out", tmp_path / "out").stdout
    assert "distances in seconds" in said
    facts = summary(tmp_path / "out")
    assert facts["sounds"]["sounds"] == 4
    assert facts["sounds"]["seconds"] == pytest.approx(6.1)
    assert facts["sounds"]["cut"] == (4 if name == "whisper" else 0)
    assert facts["left_out"] == []
    assert "texts" not in facts
    table = heads(tmp_path / "out")
    hearing = table[table["distance_unit"] == "seconds"]
    assert hearing["distance"].between(0.05, 1.0).all()
    assert hearing["previous"].notna().all()
    assert hearing["distance_unnormalized"].isna().all()
    kinds = {(layer["kind"], layer["distance_unit"]) for layer in facts["layers"]}
    expected = {("bidirectional", "seconds")}
    if name == "whisper":
        expected |= {("causal", "tokens"), ("cross", None)}
    assert kinds == expected


@pytest.mark.parametrize("name", HEARING)
def test_the_size_of_batches_does_not_matter(name, models, sounds, tmp_path):
    for size in (1, 3):
        arguments = ("--audio", sounds, "--batch-size", size, "--out", tmp_path / str(size))
        done(models(name), *arguments)
    assert summary(tmp_path / "1")["sounds"]["sounds"] == 3
    pd.testing.assert_frame_equal(
        heads(tmp_path / "1"), heads(tmp_path / "3"), atol=5e-5, check_exact=False
    )


def test_sounds_of_one_length_are_run_together(models, sounds):
    source = load_model(str(models("wav2vec2")))
    batches = batch_inputs(source, Choice(sounds=read_sounds([sounds]))).batches
    assert [tuple(batch["input_values"].shape) for batch in batches] == [(2, 8000), (1, 12800)]
    assert not any("attention_mask" in batch for batch in batches)


def test_the_decoder_reads_texts(models, sounds, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("the cat sat on the mat .\nthe dog\nthe dog ran")
    source = load_model(str(models("whisper")))
    texts = file.read_text().splitlines()
    (batch,) = batch_inputs(source, Choice(texts=texts, sounds=read_sounds([sounds]))).batches
    # The token that starts it, the words, and not the one that ends the text.
    lengths = [8, 3, 4]
    assert batch["decoder_input_ids"].shape == (3, 8)
    assert batch["decoder_input_ids"][:, 0].tolist() == [1, 1, 1]
    assert batch["decoder_attention_mask"].sum(dim=1).tolist() == lengths
    done(models("whisper"), "--text", file, "--audio", sounds, "--out", tmp_path / "out")
    facts = summary(tmp_path / "out")
    assert (facts["texts"]["texts"], facts["sounds"]["sounds"]) == (3, 3)
    kinds = heads(tmp_path / "out").groupby("kind")["entropy"].min()
    assert (kinds > 0).all()


def test_sounds_with_the_same_start_are_not_one_block(models, sounds):
    """Resampling is over sounds, not over the decoder's tokens, which are alike for all."""
    import headprobe

    source = load_model(str(models("whisper")))
    batches = batch_inputs(source, Choice()).batches
    layer = headprobe.profile(source.model, batches).measured[0]
    assert (layer.statistics["entropy"].count[:, 0] > 0).sum() > 1


# --- files ---


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_every_width_is_the_same_sound(dtype, tmp_path):
    samples = tone()
    stored = {
        "uint8": (samples * 128 + 128).round(),
        "int16": (samples * 2**15).round(),
        "int32": (samples * 2**31).round(),
    }.get(dtype, samples)
    wavfile.write(tmp_path / "sound.wav", RATE, stored.astype(dtype))
    (sound,) = read_sounds([tmp_path / "sound.wav"])
    assert sound.rate == RATE
    assert sound.samples.dtype == np.float32
    np.testing.assert_allclose(sound.samples, samples, atol=1 / 128 if dtype == "uint8" else 1e-4)


def test_channels_are_averaged(tmp_path):
    both = np.stack([tone(), np.zeros(8000)], axis=1).astype(np.float32)
    wavfile.write(tmp_path / "sound.wav", RATE, both)
    (sound,) = read_sounds([tmp_path / "sound.wav"])
    np.testing.assert_allclose(sound.samples, tone() / 2, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100])
def test_other_rates_are_resampled(rate):
    made = resampled(Sound("tone", tone(rate=rate).astype(np.float32), rate), RATE)
    assert abs(len(made) - 8000) <= 1
    middle = slice(1000, 7000)  # the filter rings at the ends
    np.testing.assert_allclose(made[middle], tone()[middle], atol=5e-3)


def test_the_rate_of_a_file_does_not_change_the_seconds(models, tmp_path):
    distances = []
    for rate in (RATE, 2 * RATE):
        folder = tmp_path / str(rate)
        folder.mkdir()
        wavfile.write(folder / "tone.wav", rate, tone(rate=rate).astype(np.float32))
        done(models("wav2vec2"), "--audio", folder, "--out", folder / "out")
        distances.append(heads(folder / "out")["distance"])
    assert distances[0].tolist() == pytest.approx(distances[1].tolist(), rel=0.02)


# --- what is refused ---


def test_files_that_are_no_sounds(models, sounds, tmp_path):
    text = tmp_path / "text.wav"
    text.write_text("this is a text")
    cut = tmp_path / "cut.wav"
    cut.write_bytes((sounds / "0.wav").read_bytes()[:20])
    silent = tmp_path / "silent.wav"
    wavfile.write(silent, RATE, np.zeros(0, dtype=np.int16))
    broken = tmp_path / "broken.wav"
    wavfile.write(broken, RATE, np.full(8000, np.nan, dtype=np.float32))
    empty = tmp_path / "nothing"
    empty.mkdir()
    for path, expected in (
        (text, "can't be read as a WAV file"),
        (cut, "can't be read as a WAV file"),
        (silent, "has no sound in it"),
        (broken, "no numbers"),
        (tmp_path / "none.wav", "does not exist"),
        (empty, "has no WAV file"),
    ):
        assert expected in refusal(models("wav2vec2"), "--audio", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sounds_that_are_too_short(models, tmp_path):
    wavfile.write(tmp_path / "click.wav", RATE, np.ones(300, dtype=np.int16))
    said = refusal(models("wav2vec2"), "--audio", tmp_path / "click.wav")
    assert "'click.wav' has 300 samples, fewer than one position" in said
    # A model that pads to its own length takes any.
    done(models("whisper"), "--audio", tmp_path / "click.wav", "--out", tmp_path / "out")


def test_models_that_hear_nothing(sounds, tmp_path):
    bert = save_bert(tmp_path / "bert")
    assert refusal(bert, "--audio", sounds) == "'bert' takes no sound: it reads text."


def test_models_that_read_nothing(models, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("the cat")
    assert "takes no text: it reads sound" in refusal(models("hubert"), "--text", file)


# --- the embedded sounds ---


def test_the_embedded_sounds():
    sounds = sample_sounds()
    assert len(sounds) == 4
    for sound in sounds:
        assert sound.rate == RATE
        assert 1 <= len(sound.samples) / RATE <= 2
        assert 0.2 < np.abs(sound.samples).max() <= 1
    folder = files("headprobe") / "data"
    sizes = [len(path.read_bytes()) for path in folder.iterdir() if path.name.endswith(".wav")]
    assert max(sizes) < 70_000


def test_precision_of_the_model(models):
    source = load_model(str(models("whisper")), dtype="bfloat16")
    batch = batch_inputs(source, Choice()).batches[0]
    assert batch["input_features"].dtype == torch.bfloat16
    assert batch["decoder_input_ids"].dtype == torch.int64
