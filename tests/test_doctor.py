"""What `examine` and `headprobe doctor` say of a model."""

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

import headprobe
from headprobe.cli import main
from tests.models import Nano, flash, make
from tests.tiny import save_bert, save_mamba


@pytest.mark.parametrize(
    "name", ["bert-sdpa", "gpt2-eager", "t5-sdpa", "bart-eager", "cross_padded"]
)
def test_nothing_is_wrong_with_a_model_that_can_be_seen(name):
    model, inputs = make(name)
    found = headprobe.examine(model, inputs)
    assert found.problems == ()
    assert found.gate_difference < 1e-6
    table = found.table()
    assert (table["reconstruction_error"] < 1e-5).all()
    assert table["row_sum_low"].between(1 - 1e-5, 1 + 1e-5).all()
    assert table["row_sum_high"].between(1 - 1e-5, 1 + 1e-5).all()
    assert table["ablation"].all()
    assert (table["output_projection"] != "").all()


def test_the_table_says_what_each_module_is():
    model, inputs = make("llama-sdpa")
    table = headprobe.examine(model, inputs).table().set_index("layer")
    assert table["site"].tolist() == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert table.loc[0, "kind"] == "causal"
    assert table.loc[0, ["heads", "kv_heads", "query_dim", "value_dim"]].tolist() == [4, 2, 16, 16]
    assert table.loc[0, "captured_at"] == "sdpa"
    assert table.loc[0, "padding_mass"] == 0
    assert table.loc[0, "pruning"] == "by group of 2 heads"


def test_the_padding_of_a_text_must_not_move_its_output():
    class Pooled(Nano):
        """Its attention uses the mask; what it adds afterwards is over all positions."""

        def forward(self, input_ids, attention_mask):
            x = self.wte(input_ids)
            q, k, v = (
                side.unflatten(-1, (4, 8)).transpose(1, 2)
                for side in self.c_attn(x).split(32, dim=-1)
            )
            mask = attention_mask[:, None, None].bool()
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.c_proj(z.transpose(1, 2).flatten(2)) + x.mean(dim=1, keepdim=True)

    inputs = make("bert-sdpa")[1]
    with pytest.raises(headprobe.HeadprobeError, match="padding changes the model's output"):
        headprobe.examine(Pooled(attend=flash), inputs)


def test_what_is_left_out_is_a_problem_and_linear_attention_is_none():
    class Two(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.first, self.second = Nano(attend=flash), Nano(attend=second)

        def forward(self, idx):
            return self.first(idx) + self.second(idx)

    batch = {"idx": torch.randint(0, 60, (2, 9))}
    halved = headprobe.examine(Two(lambda q, k, v: (q @ k.mT).softmax(-1) / 2 @ v), batch)
    assert halved.table()["site"].tolist() == ["first"]
    (problem,) = halved.problems
    assert problem.startswith("second: its rows don't sum to 1")
    linear = headprobe.examine(Two(lambda q, k, v: q @ k.mT @ v), batch)
    assert linear.problems == ()
    assert linear.without_softmax == ["second"]


def test_training_flags_and_outputs_are_as_before():
    model, inputs = make("bert-sdpa")
    model.train()
    model.encoder.layer[1].eval()
    before = [module.training for module in model.modules()]
    headprobe.examine(model, inputs)
    assert [module.training for module in model.modules()] == before


def test_the_command_prints_a_line_per_module(tmp_path):
    result = CliRunner().invoke(main, ["doctor", str(save_bert(tmp_path / "bert"))])
    assert result.exit_code == 0, result.output
    assert "encoder.layer.0.attention.self" in result.output
    assert "bidirectional 1" in result.output
    assert "Padding moves the output of a text by" in result.output
    assert "0 problems." in result.output


def test_the_command_fails_where_nothing_attends(tmp_path):
    result = CliRunner().invoke(main, ["doctor", str(save_mamba(tmp_path / "mamba"))])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "no softmax attention was seen" in result.output


HALVED = """
import torch
from torch import nn

class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attn = nn.Linear(8, 24), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        q, k, v = self.qkv(self.attn(x, x, x)[0]).chunk(3, dim=-1)
        return ((q @ k.mT).softmax(dim=-1) / 2) @ v

def build():
    return Halved(), [{"x": torch.randn(2, 5, 8)}]
"""


def test_the_command_fails_where_something_is_wrong(tmp_path):
    (tmp_path / "halved.py").write_text(HALVED)
    result = CliRunner().invoke(main, ["doctor", "--module", f"{tmp_path / 'halved.py'}:build"])
    assert result.exit_code == 1
    assert "its rows don't sum to 1" in result.output
    assert "1 attention calls captured" in result.output


def test_modules_that_are_left_out_for_one_reason_share_a_line():
    from headprobe.terminal import _by_reason

    lines = _by_reason({"a": "x", "b": "y", "c": "x", "d": "x", "e": "x"})
    assert lines == ["a, c, d and 1 more: x", "b: y"]
