"""The sweep over model types: a sample of it, and that it would notice a map that isn't true."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch

from headprobe.capture import AttentionCall
from scripts.sweep import judge
from scripts.sweep.__main__ import VERDICTS, summary
from scripts.sweep.build import model_types, parameters_of
from scripts.sweep.compare import SAME
from scripts.sweep.judge import COLUMNS, Row
from scripts.sweep.runs import find_run

SAMPLE = {
    "bert": "captured",
    "llama": "captured",
    "gpt_oss": "captured",
    "deepseek_v3": "captured",
    "t5": "captured",
    "bart": "captured",
    "vit": "captured",
    "clip": "captured",
    "llava": "captured",
    "whisper": "captured",
    "wav2vec2": "captured",
    "wavlm": "captured",  # gives the mean over the heads
    "mamba": "no attention",
    "longformer": "refused",
}


# What transformers says of its own models is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_of_the_model_types(kind):
    rows = list(judge.judge(kind))
    assert {row.verdict for row in rows} == {SAMPLE[kind]}, rows
    assert {row.type for row in rows} == {kind}
    for row in rows:
        assert row.parameters < 5e6
        if row.verdict == "captured":
            assert row.calls >= row.maps_compared > 0
            assert row.max_difference <= SAME


def uniform(call, index, at=AttentionCall.at):
    block = at(call, index)
    return block._replace(weights=torch.full_like(block.weights, 1 / call.keys))


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_map_that_is_not_the_models_own_is_called_wrong(kind, monkeypatch):
    profile = type("Profile", (), {"left_out": {}, "measured": ()})
    monkeypatch.setattr(judge, "profile", lambda *arguments: profile)
    monkeypatch.setattr(AttentionCall, "at", uniform)
    assert {row.verdict for row in judge.judge(kind)} == {"WRONG"}


def test_an_error_in_headprobe_is_told_from_one_of_the_model(monkeypatch):
    def fail(*arguments):
        raise KeyError("headprobe's own")

    monkeypatch.setattr(AttentionCall, "at", fail)
    assert {row.verdict for row in judge.judge("bert")} == {"raised"}


def test_image_tokens_are_as_many_as_the_features():
    run = find_run("llava")
    tokens = run.inputs["input_ids"] == run.model.config.image_token_id
    images = run.model.get_image_features(run.inputs["pixel_values"]).pooler_output
    assert tokens.sum(dim=1).tolist() == [len(image) for image in images]
    assert parameters_of(type(run.model), run.model.config) == run.model.num_parameters()


def test_the_summary_counts_each_type_once():
    rows = [
        Row("a", "A", "sdpa", verdict="captured"),
        Row("a", "A", "eager", verdict="WRONG"),
        Row("b", "B", "sdpa", verdict="captured"),
        Row("b", "B", "eager", verdict="not run"),
    ]
    table, share = summary(rows).split("\n\n")
    assert share == "Captured of the 2 that run and attend: 50.0%"
    counts = Counter()
    for line in table.splitlines()[2:]:
        _, verdict, count, *_ = line.split("|")
        counts[verdict.strip()] = int(count)
    assert counts == Counter(dict.fromkeys(VERDICTS, 0) | {"captured": 1, "WRONG": 1})
    assert list(rows[0].cells()) == COLUMNS


def test_the_readme_says_what_the_table_says():
    root = Path(__file__).parent.parent
    table = csv.DictReader((root / "reports/coverage.csv").read_text("utf-8").splitlines())
    rows = [
        Row(row["type"], row["class"], row["attention"], verdict=row["verdict"]) for row in table
    ]
    counts = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in summary(rows).splitlines()[2:-2]
    }
    assert counts["raised"] == counts["WRONG"] == "0"
    order = (
        "captured",
        "left out partly",
        "refused",
        "WRONG",
        "no attention",
        "not built",
        "not run",
    )
    shown = " | ".join(counts[verdict] for verdict in order)
    assert f"| {shown} |" in (root / "README.md").read_text(encoding="utf-8")


def test_every_type_has_a_class():
    types = model_types()
    assert list(types) == sorted(types)
    assert all(types.values())
    assert len(types) > 500
