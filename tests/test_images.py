"""headprobe analyze on images: files, folders, the embedded ones; two towers; what is refused."""

import json
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from PIL import Image

from headprobe.cli import main
from headprobe.inputs import read_images, sample_images
from tests.media import SEEING, save_media
from tests.test_cli import done, refusal
from tests.tiny import save_bert


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> the folder of a saved model, made once."""
    folder, saved = tmp_path_factory.mktemp("seeing"), {}

    def saved_as(name):
        if name not in saved:
            saved[name] = save_media(name, folder / name)
        return saved[name]

    return saved_as


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Five images of other sizes, colours and formats, and a file that is none of the kind."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    kinds = [((40, 30), "RGB", "png"), ((64, 64), "L", "png"), ((33, 50), "RGBA", "png")]
    kinds += [((48, 48), "RGB", "jpg"), ((20, 90), "P", "gif")]
    for number, (size, mode, suffix) in enumerate(kinds):
        pixels = draw.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        image = Image.fromarray(pixels).convert(mode)
        image.save(folder / f"{number}.{suffix}")
    (folder / "notes.txt").write_text("not an image")
    return folder


def summary(folder):
    return json.loads((folder / "summary.json").read_text("utf-8"))


def heads(folder):
    return pd.read_csv(folder / "heads.csv")


@pytest.mark.parametrize("name", SEEING)
def test_embedded_images(name, models, tmp_path):
    said = done(models(name), "--out", tmp_path / "out").stdout
    assert "distances in pixels" in said
    facts = summary(tmp_path / "out")
    assert facts["images"]["images"] == 8
    assert len(facts["images"]["hash"]) == 64
    assert facts["left_out"] == []
    assert ("texts" in facts) == (name == "clip")
    for layer in facts["layers"]:
        assert layer["reconstruction_error"] < 1e-5
        assert layer["distance_unit"] == ("tokens" if layer["stack"] == "text" else "pixels")
    table = heads(tmp_path / "out")
    assert table.columns[-2:].tolist() == ["distance_unnormalized", "distance_unit"]
    seeing = table[table["distance_unit"] == "pixels"]
    assert seeing["distance"].between(1, 32 * 2**0.5).all()
    assert seeing["special"].notna().all() == (name != "swin")
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "pixels" in page


def test_files_and_folders(models, pictures, tmp_path):
    done(models("vit"), "--images", pictures, "--out", tmp_path / "0")
    facts = summary(tmp_path / "0")
    assert facts["images"]["images"] == 5
    one_by_one = [a for name in sorted(pictures.glob("*.[pjg]*")) for a in ("--images", name)]
    done(models("vit"), *one_by_one, "--out", tmp_path / "files", "--batch-size", 2)
    assert summary(tmp_path / "files")["images"] == facts["images"]
    pd.testing.assert_frame_equal(
        heads(tmp_path / "0"), heads(tmp_path / "files"), atol=2e-5, check_exact=False
    )
    done(models("vit"), "--images", pictures, "--max-texts", 2, "--out", tmp_path / "two")
    assert summary(tmp_path / "two")["images"]["images"] == 2


def test_a_run_is_repeatable(models, pictures, tmp_path):
    for folder in ("a", "b"):
        done(models("beit"), "--images", pictures, "--out", tmp_path / folder)
    for name in ("heads.csv", "similarity.csv", "report.html", "profile.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("texts", "counted", "note"),
    [
        (1, 5, "the one text was run with each of the images"),
        (3, 3, "of 3 texts and 5 images the first 3 were run, in pairs"),
        (5, 5, None),
        (7, 5, "of 7 texts and 5 images the first 5 were run, in pairs"),
    ],
)
def test_as_many_texts_as_images(texts, counted, note, models, pictures, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(["the cat sat on the mat ."] * texts))
    arguments = ("--text", file, "--images", pictures, "--out", tmp_path / "out")
    said = done(models("clip"), *arguments).stdout
    facts = summary(tmp_path / "out")
    assert facts["images"]["images"] == facts["texts"]["texts"] == counted
    assert facts.get("notes", []) == ([note] if note else [])
    assert ("Note: " in said) == bool(note)


def test_texts_of_other_lengths_beside_images(models, pictures, tmp_path):
    """Padding of the texts does not count, and batches change nothing."""
    file = tmp_path / "texts.txt"
    lines = [
        "the cat",
        "the cat sat on the mat .",
        "dog",
        "the dog ran , the cat sat",
        "on the mat",
    ]
    file.write_text("\n".join(lines))
    for size in (1, 5):
        arguments = ("--text", file, "--images", pictures, "--batch-size", size)
        done(models("clip"), *arguments, "--out", tmp_path / str(size))
    pd.testing.assert_frame_equal(
        heads(tmp_path / "1"), heads(tmp_path / "5"), atol=2e-5, check_exact=False
    )


def test_doctor_looks_at_images(models):
    result = CliRunner().invoke(main, ["doctor", str(models("vit"))])
    assert result.exit_code == 0, result.output
    assert "2 attention calls captured" in result.output


# --- what is refused ---


def test_files_that_are_no_images(models, pictures, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("this is a text")
    whole = (pictures / "0.png").read_bytes()
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(whole[: len(whole) // 2])
    empty = tmp_path / "nothing"
    empty.mkdir()
    for path, expected in (
        (text, "can't be read as an image"),
        (damaged, "can't be read as an image"),
        (tmp_path / "none.png", "does not exist"),
        (empty, "has no image"),
    ):
        assert expected in refusal(models("vit"), "--images", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_that_see_nothing(pictures, tmp_path):
    bert = save_bert(tmp_path / "bert")
    assert refusal(bert, "--images", pictures) == "'bert' takes no images: it reads text."


def test_models_that_read_nothing(models, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("the cat")
    assert "takes no text: it reads images" in refusal(models("vit"), "--text", file)
    assert "takes no sound" in refusal(models("vit"), "--audio", sound_file(tmp_path))


def sound_file(folder):
    from scipy.io import wavfile

    wavfile.write(folder / "sound.wav", 16_000, np.zeros(8000, dtype=np.int16))
    return folder / "sound.wav"


def test_images_and_sounds_at_once(models, pictures, tmp_path):
    said = refusal(models("vit"), "--images", pictures, "--audio", sound_file(tmp_path))
    assert "can't be run together" in said


def test_a_model_without_its_processor(models, tmp_path):
    folder = save_media("vit", tmp_path / "vit")
    (folder / "preprocessor_config.json").unlink()
    assert "image processor" in refusal(folder)


def test_without_pillow(models, pictures, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert 'pip install "headprobe[images]"' in refusal(models("vit"), "--images", pictures)


def test_images_do_not_go_with_a_module(pictures):
    said = refusal("--module", "mine.py:build", "--images", pictures, code=2)
    assert "--module makes model and batches itself" in said


# --- the embedded images ---


def test_the_embedded_images_are_small_and_unlike():
    images = sample_images()
    assert len(images) == 8
    assert {(image.size, image.mode) for image in images} == {((96, 96), "RGB")}
    assert len({image.tobytes() for image in images}) == 8
    folder = files("headprobe") / "data"
    sizes = [len(path.read_bytes()) for path in folder.iterdir() if path.name.endswith(".png")]
    assert max(sizes) < 12_000


def test_cameras_held_on_their_side(tmp_path):
    """The image is turned as its own record says."""
    pixels = np.zeros((10, 20, 3), dtype=np.uint8)
    pixels[:, :10] = 255
    image = Image.fromarray(pixels)
    record = image.getexif()
    record[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=record)
    (read,) = read_images([tmp_path / "turned.png"])
    assert read.size == (10, 20)
    assert np.asarray(read)[0, 0].tolist() == [255, 255, 255]
