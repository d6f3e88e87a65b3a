"""`--module`: a person's own model and batches."""

import json

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

import headprobe
from headprobe import HeadprobeError
from headprobe.cli import main
from headprobe.inputs import build_module

GOOD = """
import torch
from torch import nn
from neighbour import WIDTH

def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, ({"src": torch.randn(3, 7, WIDTH)} for _ in range(2))

def second():
    model, batches = build()
    for layer in model.layers:
        layer.self_attn.batch_first = False
    return model, [{"src": b["src"].transpose(0, 1)} for b in batches], {"batch_first": False}
"""


@pytest.fixture
def good(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 16\n")
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_a_report_of_any_module(good, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["analyze", "--module", f"{good}:build", "--out", str(out)])
    assert result.exit_code == 0, result.output
    torch.manual_seed(0)
    source, batches = build_module(f"{good}:build")
    expected = headprobe.profile(source.model, batches.batches).heads()
    heads = pd.read_csv(out / "heads.csv", keep_default_na=False)
    assert heads["site"].tolist() == expected["site"].tolist()
    assert heads["entropy"].tolist() == pytest.approx(expected["entropy"].tolist(), rel=1e-5)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["model"]["name"] == "mine"
    assert summary["model"]["class"] == "TransformerEncoder"
    assert summary["texts"]["texts"] == 6
    assert "mine" in (out / "report.html").read_text()


def test_the_batch_may_be_the_second_axis(good, tmp_path):
    for name in ("build", "second"):
        arguments = ["analyze", "--module", f"{good}:{name}", "--out", str(tmp_path / name)]
        assert CliRunner().invoke(main, arguments).exit_code == 0
    one, two = (pd.read_csv(tmp_path / name / "heads.csv") for name in ("build", "second"))
    pd.testing.assert_frame_equal(one, two, atol=2e-6)


WRONG = {
    "nofile.py:build": "does not exist",
    "mine.py": "expected a file and a function",
    "mine.py:": "expected a file and a function",
    "mine.py:other": "has no function 'other'",
    "broken.py:build": "can't be run: SyntaxError",
    "raises.py:build": "raised RuntimeError: out of luck",
    "returns.py:one": "returned a Linear: expected (model, batches)",
    "returns.py:no_model": "returned a int as the model",
    "returns.py:one_batch": "returned a dict as the batches",
    "returns.py:no_batches": "returned nothing as batches",
    "returns.py:tensors": "returned other things as batches",
    "returns.py:options": "returned options {'rows': 3}",
    "returns.py:wrong_keyword": "unexpected keyword argument 'y'",
}


@pytest.mark.parametrize("spec", WRONG)
def test_what_is_no_model_with_batches_is_named(good, spec):
    folder = good.parent
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "raises.py").write_text("def build():\n    raise RuntimeError('out of luck')\n")
    (folder / "returns.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def one(): return nn.Linear(2, 2)\n"
        "def no_model(): return 3, [{}]\n"
        "def one_batch(): return nn.Linear(2, 2), {'x': torch.ones(1, 2)}\n"
        "def no_batches(): return nn.Linear(2, 2), []\n"
        "def tensors(): return nn.Linear(2, 2), [torch.ones(1, 2)]\n"
        "def options(): return nn.Linear(2, 2), [{}], {'rows': 3}\n"
        "def wrong_keyword(): return nn.MultiheadAttention(2, 1), [{'y': torch.ones(1, 2, 2)}]\n"
    )
    out = folder / "out"
    result = CliRunner().invoke(
        main, ["analyze", "--module", f"{folder}/{spec}", "--out", str(out)]
    )
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert WRONG[spec] in result.output
    assert len(result.output.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("more", [["some-model"], ["--text", "file.txt"], ["--device", "cuda"]])
def test_a_module_brings_its_own_model_and_batches(good, more):
    result = CliRunner().invoke(main, ["analyze", "--module", f"{good}:build", *more])
    assert result.exit_code == 2
    assert "--module makes model and batches itself" in result.output


def test_the_path_is_left_as_it_was(good):
    import sys

    before = list(sys.path)
    build_module(f"{good}:build")
    with pytest.raises(HeadprobeError):
        build_module(f"{good}:other")
    assert sys.path == before
