"""Where positions lie in images and sound, and the distances that follow from it."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headprobe
from headprobe.capture import Capture
from headprobe.profile import Profile
from headprobe.statistics import Distance, DistanceUnnormalized, Rows
from tests import media

PIXELS = torch.randn(2, 3, media.PIXELS, media.PIXELS)
CENTRES = [3.5, 11.5, 19.5, 27.5]  # of patches of 8 pixels
GRID = torch.tensor([[y, x] for y in CENTRES for x in CENTRES])


def seen(model, **inputs):
    """Every attention call of a run."""
    calls = []
    with torch.no_grad(), Capture(model.eval(), calls.append):
        model(**inputs)
    return calls


def places(model, **inputs):
    return seen(model, **inputs)[0].places


class Seeing(nn.Module):
    """One layer of attention over what a function makes of images: [batch, positions, 8]."""

    def __init__(self, stem, patches):
        super().__init__()
        self.stem, self.patches = stem, patches
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, pixels):
        x = self.patches(self.stem(pixels))
        return self.attention(x, x, x)[0]


def lines(x):
    return x.flatten(2).transpose(1, 2)


# --- where the positions lie ---


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "before"), [("vit", 1), ("dinov2_with_registers", 4), ("beit", 1)]
)
def test_patches_lie_on_a_grid_and_class_tokens_nowhere(name, before, kernel):
    for call in seen(media.SEEING[name](attn_implementation=kernel), pixel_values=PIXELS):
        found = call.places
        assert (found.unit, found.reason, found.sequences) == ("pixels", "", None)
        assert found.coordinates[:, :before].isnan().all()
        assert torch.equal(found.coordinates[:, before:], GRID.expand(2, -1, -1))


@pytest.mark.parametrize(
    ("stem", "centres"),
    [
        (nn.Conv2d(1, 8, 4, 4), [1.5, 5.5, 9.5, 13.5]),
        (nn.Conv2d(1, 8, 3, 4, padding=1), [0.0, 4.0, 8.0, 12.0]),
        (nn.Conv2d(1, 8, 3, 4, padding=2, dilation=2), [0.0, 4.0, 8.0, 12.0]),
        (nn.Conv2d(1, 8, 3, 1, padding="same"), [float(i) for i in range(16)]),
        (nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.Conv2d(4, 8, 2, 2)), [1.5, 5.5, 9.5, 13.5]),
        (
            nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            [1.0, 5.0, 9.0, 13.0],
        ),
        (nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(1, 8, 2, 4)), [0.5, 4.5, 8.5, 12.5]),
    ],
    ids=["patches", "padded", "dilated", "same", "two", "stem", "uneven"],
)
def test_strides_and_paddings_of_convolutions_add_up(stem, centres):
    found = places(Seeing(stem, lines), pixels=torch.randn(2, 1, 16, 16))
    assert found.unit == "pixels"
    assert not found.padded
    expected = [[y, x] for y in centres for x in centres]
    assert found.coordinates[1].tolist() == expected


def test_patches_cut_by_reshaping_are_followed_too():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x):
            x = x.reshape(len(x), 4, 4, 4, 4).permute(0, 1, 3, 2, 4)
            return self.linear(x.reshape(len(x), 16, 16))

    found = places(Seeing(Cut(), nn.Identity()), pixels=torch.randn(2, 16, 16))
    middles = [1.5, 5.5, 9.5, 13.5]
    assert found.coordinates[0].tolist() == [[y, x] for y in middles for x in middles]


def mixed(x):
    """Positions that are cumulative sums have no place of their own."""
    return lines(x).cumsum(dim=1)


def shuffled(x):
    return lines(x)[:, [2, 0, 3, 1, *range(4, 16)]]


def test_what_is_not_known_is_not_guessed():
    model = Seeing(nn.Conv2d(1, 8, 4, 4), mixed)
    inputs = {"pixels": torch.randn(2, 1, 16, 16)}
    found = places(model, **inputs)
    assert found.unit == ""
    assert found.coordinates is None
    assert "could not be followed" in found.reason
    heads = headprobe.profile(model, [inputs]).heads()
    unknown = ["distance", "distance_ratio", "distance_unnormalized", "previous", "next"]
    assert heads[unknown].isna().all(axis=None)
    assert heads[["entropy", "current", "first", "sink"]].notna().all(axis=None)
    assert set(heads["distance_unit"]) == {""}


def test_patches_in_another_order_keep_their_places():
    found = places(Seeing(nn.Conv2d(1, 8, 4, 4), shuffled), pixels=torch.randn(2, 1, 16, 16))
    assert found.coordinates[0, :4, 1].tolist() == [9.5, 1.5, 13.5, 5.5]


def test_ready_patches_have_no_places():
    """A model that takes patches as they are: position i may lie anywhere."""
    found = places(Seeing(nn.Linear(12, 8), nn.Identity()), pixels=torch.randn(2, 16, 12))
    assert found.unit == ""
    assert "ready patches" in found.reason


def test_frames_of_sound():
    class Hearing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(1, 8, 10, 5), nn.GELU(), nn.Conv1d(8, 8, 3, 2))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, wave):
            x = self.conv(wave[:, None]).transpose(1, 2)
            return self.attention(x, x, x)[0]

    model, inputs = Hearing(), {"wave": torch.randn(2, 100)}
    found = places(model, **inputs)
    # The first window covers 0 to 9, its middle is 4.5; the second convolution takes three of them.
    assert found.unit == "frames"
    assert found.coordinates[0, :, 0].tolist() == [9.5 + 10 * i for i in range(9)]
    frames = headprobe.profile(model, [inputs]).heads()
    seconds = headprobe.profile(model, [inputs], seconds={"wave": 1 / 50}).heads()
    assert [set(t["distance_unit"]) for t in (frames, seconds)] == [{"frames"}, {"seconds"}]
    torch.testing.assert_close(
        torch.tensor(frames["distance"] / 50), torch.tensor(seconds["distance"])
    )
    for same in ("distance_ratio", "previous", "next", "entropy"):
        assert frames[same].tolist() == pytest.approx(seconds[same].tolist(), abs=1e-6)
    assert frames["distance_unnormalized"].isna().all()


@pytest.mark.parametrize("name", media.HEARING)
def test_positions_of_speech_models(name):
    if name == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 100)}
        inputs["decoder_input_ids"] = torch.ones(2, 3, dtype=torch.long)
        expected = [2.0 * i for i in range(50)]
    else:
        inputs = {"input_values": torch.randn(2, 4000)}
        expected = [199.5 + 320 * i for i in range(12)]
    first, *others = [call.places for call in seen(media.HEARING[name](), **inputs)]
    assert first.unit == "frames"
    assert first.coordinates[0, :, 0].tolist() == expected
    assert [place.unit for place in others] == (["tokens", ""] if name == "whisper" else ["frames"])


def test_a_mask_without_padding_hides_no_sound():
    model, waves = media.wav2vec2(), torch.randn(2, 4000)
    given = {"input_values": waves, "attention_mask": torch.ones(2, 4000, dtype=torch.long)}
    result = headprobe.profile(model, [given])
    assert result.left_out == {}
    assert_same(result, headprobe.profile(model, [{"input_values": waves}]))
    given["attention_mask"][1, 2000:] = 0
    padded = headprobe.profile(model, [given])
    assert "the mask of 'input_values' has 4000" in padded.left_out["encoder.layers.0.attention"]


def test_sequences_of_vectors_and_tokens_are_counted():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = places(layer, src=torch.randn(2, 5, 8))
    assert (found.unit, found.coordinates) == ("positions", None)
    found = places(media.clip().text_model, input_ids=torch.ones(2, 5, dtype=torch.long))
    assert (found.unit, found.coordinates) == ("tokens", None)


def test_two_towers_have_units_of_their_own():
    tokens = torch.ones(2, 5, dtype=torch.long)
    calls = seen(media.clip(), input_ids=tokens, pixel_values=PIXELS)
    assert {call.site.split("_")[0]: call.places.unit for call in calls} == {
        "text": "tokens",
        "vision": "pixels",
    }


# --- windows ---


def test_shifted_windows_are_cut_from_the_picture():
    calls = seen(media.swin(), pixel_values=PIXELS)
    plain, shifted = calls[0].places, calls[1].places
    # 8 x 8 patches of 4 pixels, in windows of 4 x 4: four windows of each of the two images.
    assert plain.sequences.tolist() == shifted.sequences.tolist() == [0] * 4 + [1] * 4
    assert plain.coordinates.shape == (8, 16, 2)
    assert plain.coordinates[0, :5].tolist() == [[1.5, 1.5 + 4 * i] for i in range(4)] + [
        [5.5, 1.5]
    ]
    assert plain.coordinates[1, 0].tolist() == [1.5, 17.5]
    assert shifted.coordinates[0, 0].tolist() == [9.5, 9.5]
    # The last window goes round the corner: it begins at patch 6 of 8 and ends at patch 1.
    assert shifted.coordinates[3, 0].tolist() == [25.5, 25.5]
    assert shifted.coordinates[3, 15].tolist() == [5.5, 5.5]
    merged = calls[2].places
    assert merged.sequences is None  # one window is the whole picture
    assert merged.coordinates[0, :2].tolist() == [[3.5, 3.5], [3.5, 11.5]]


def test_windows_are_measured():
    model = media.swin()
    whole = headprobe.profile(model, [{"pixel_values": PIXELS}])
    assert whole.left_out == {}
    heads = whole.heads()
    assert heads.groupby("layer")["head"].count().tolist() == [2, 2, 4, 4]
    assert heads["distance"].notna().all()
    assert heads[["first", "sink"]].isna().all(axis=1).tolist() == [True] * 4 + [False] * 8
    # How many keys a row of a window that goes round may see is not known: its mask is finite.
    unknown = heads[["entropy_normalized", "distance_ratio"]].isna().all(axis=1)
    assert unknown.tolist() == [False] * 2 + [True] * 2 + [False] * 8
    alone = Profile()
    for image in PIXELS:
        alone += headprobe.profile(model, [{"pixel_values": image[None]}])
    assert_same(whole, alone)


def test_windows_that_are_not_shifted_alike_have_no_similarity():
    pairs = headprobe.profile(media.swin(), [{"pixel_values": PIXELS}]).pairs()
    known = pairs.set_index(["layer_a", "layer_b"])["js_similarity"].notna()
    assert known.loc[(0, 0)].all()
    assert known.loc[(2, 3)].all()
    assert not known.loc[(0, 1)].any()
    assert not known.loc[(0, 2)].any()


def test_windows_with_padding_are_left_out():
    left_out = headprobe.profile(media.swin(window=3), [{"pixel_values": PIXELS}]).left_out
    assert any("padding that the model added" in reason for reason in left_out.values())


# --- distances ---


def rows(weights, coordinates):
    """The rows of one head on one image."""
    n = len(weights)
    return Rows(
        weights=torch.as_tensor(weights)[None, None],
        positions=torch.arange(n),
        query_valid=torch.ones(1, n, dtype=torch.bool),
        key_valid=torch.ones(1, n, dtype=torch.bool),
        visible=torch.ones(1, 1, 1, n, dtype=torch.bool),
        coordinates=torch.as_tensor(coordinates)[None],
    )


SQUARE = [[0.0, 0.0], [0.0, 16.0], [16.0, 0.0], [16.0, 16.0]]
NOWHERE = [[math.nan, math.nan]]


def value(statistic, made):
    measured = statistic.of(made)
    return None if measured is None else measured.value().item()


def test_a_uniform_head_on_four_patches():
    made = rows(torch.full((4, 4), 0.25), SQUARE)
    expected = 16 * (0 + 1 + 1 + math.sqrt(2)) / 4
    assert expected == pytest.approx(13.657, abs=1e-3)
    assert value(Distance, made) == pytest.approx(expected, rel=1e-6)
    assert value(DistanceUnnormalized, made) == pytest.approx(expected, rel=1e-6)


def test_class_tokens_with_and_without_renormalising():
    made = rows(torch.full((5, 5), 0.2), NOWHERE + SQUARE)
    expected = 16 * (0 + 1 + 1 + math.sqrt(2)) / 4
    assert value(Distance, made) == pytest.approx(expected, rel=1e-6)
    assert value(DistanceUnnormalized, made) == pytest.approx(expected * 4 / 5, rel=1e-6)


def test_rows_that_are_all_on_the_class_token_have_no_distance():
    weights = torch.full((5, 5), 0.2)
    weights[1] = torch.tensor([0.96, 0.0, 0.04, 0.0, 0.0])  # 4 % on a patch 16 pixels away
    made = rows(weights, NOWHERE + SQUARE)
    one = 16 * (2 + math.sqrt(2)) / 4
    assert value(Distance, made) == pytest.approx(one, rel=1e-6)
    unnormalized = (0.04 * 16 + 3 * one * 4 / 5) / 4
    assert value(DistanceUnnormalized, made) == pytest.approx(unnormalized, rel=1e-6)


def test_on_a_line_there_are_neighbours_and_on_a_grid_there_are_none():
    line = rows(torch.full((3, 3), 1 / 3), [[0.0], [2.0], [4.0]])
    assert line.is_line
    assert value(Distance, line) == pytest.approx(2 * 8 / 9, rel=1e-6)
    assert value(DistanceUnnormalized, line) is None
    assert not rows(torch.full((4, 4), 0.25), SQUARE).is_line
    assert not rows(torch.full((2, 2), 0.5), [[math.nan], [0.0]]).is_line


# --- what must not matter ---


def assert_same(a, b):
    for mine, other in zip(a.measured, b.measured, strict=True):
        assert mine.distance_unit == other.distance_unit
        assert mine.statistics.keys() == other.statistics.keys()
        for name, sums in mine.statistics.items():
            torch.testing.assert_close(
                sums.value(), other.statistics[name].value(), atol=2e-5, rtol=1e-5, equal_nan=True
            )


@pytest.mark.parametrize("name", ["vit", "dinov2_with_registers", "beit"])
def test_the_size_of_batches_does_not_matter(name):
    model, images = media.SEEING[name](), torch.randn(5, 3, media.PIXELS, media.PIXELS)
    profiles = [
        headprobe.profile(model, [{"pixel_values": part} for part in images.split(size)])
        for size in (1, 2, 5)
    ]
    assert_same(profiles[0], profiles[1])
    assert_same(profiles[0], profiles[2])
    blocks = [p.measured[0].statistics["entropy"].count for p in profiles]
    assert torch.equal(blocks[0], blocks[2])


def test_the_order_of_patches_does_not_matter():
    """A head without positions sees a picture whose patches have changed places alike."""
    torch.manual_seed(0)
    stem, images = nn.Conv2d(1, 8, 4, 4), {"pixels": torch.randn(2, 1, 16, 16)}
    first = Seeing(stem, lines)
    second = Seeing(stem, shuffled)
    second.attention = first.attention
    distances = [headprobe.profile(m, [images]).heads()["distance"] for m in (first, second)]
    assert distances[0].tolist() == pytest.approx(distances[1].tolist(), rel=1e-5)


def test_units_survive_saving(tmp_path):
    result = headprobe.profile(media.vit(), [{"pixel_values": PIXELS}])
    result.save(tmp_path / "profile.safetensors")
    assert_same(result, Profile.load(tmp_path / "profile.safetensors"))
    assert set(result.heads()["distance_unit"]) == {"pixels"}


def test_a_uniform_head_has_the_ratio_one():
    model = media.vit()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "query" in name:
            parameter.data.zero_()
    heads = headprobe.profile(model, [{"pixel_values": PIXELS}]).heads()
    expected = (GRID[:, None] - GRID[None]).norm(dim=-1).mean().item()
    assert heads["distance"].tolist() == pytest.approx([expected] * 8, rel=1e-5)
    assert heads["distance_ratio"].tolist() == pytest.approx([1.0] * 8, rel=1e-5)
    assert heads["special"].tolist() == pytest.approx([1 / 17] * 8, rel=1e-5)
    unnormalized = [expected * 16 / 17] * 8
    assert heads["distance_unnormalized"].tolist() == pytest.approx(unnormalized, rel=1e-5)


def test_following_leaves_the_model_alone():
    model = media.swin().eval()
    with torch.no_grad():
        before = model(pixel_values=PIXELS).last_hidden_state
        with Capture(model, lambda call: None):
            during = model(pixel_values=PIXELS).last_hidden_state
    assert torch.equal(before, during)


def test_functions_that_change_places_in_between():
    """Flips, rolls, pads and joins, as models cut and glue patches."""

    def glued(x):
        x = F.pad(x, (0, 0, 1, 1))[:, :, 1:-1].flip(3).roll(1, dims=3)
        top, bottom = x.chunk(2, dim=2)
        return lines(torch.cat([bottom, top], dim=2))

    found = places(Seeing(nn.Conv2d(1, 8, 4, 4), glued), pixels=torch.randn(2, 1, 16, 16))
    assert not found.padded
    assert found.coordinates[0, :4].tolist() == [[9.5, 1.5], [9.5, 13.5], [9.5, 9.5], [9.5, 5.5]]
    assert found.coordinates[0, 8, 0] == 1.5


def test_the_reason_is_in_the_summary(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\nfrom tests.test_places import Seeing, mixed\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    model = Seeing(nn.Conv2d(1, 8, 4, 4), mixed)\n"
        "    return model, [{'pixels': torch.randn(2, 1, 16, 16)}]\n"
    )
    from click.testing import CliRunner

    from headprobe.cli import main

    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["analyze", "--module", f"{file}:build", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (layer,) = json.loads((out / "summary.json").read_text())["layers"]
    assert layer["distance_unit"] is None
    assert "could not be followed" in layer["no_distance"]
