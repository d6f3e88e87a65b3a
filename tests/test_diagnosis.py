"""The diagnosis: planted truths end to end, and groups, flags and sentences of tables by hand."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

from headprobe.attention import MultiHeadAttention
from headprobe.diagnosis import RULES, Diagnosis, diagnose
from headprobe.inputs import batch_texts, load_model, sample_texts
from headprobe.profile import Profile, profile

# -- tables by hand -----------------------------------------------------------------------------


def tables(
    similarities: dict[tuple[int, int], float],
    *,
    heads: int = 4,
    kind: str = "causal",
    stack: str = "",
    layer: int = 0,
    **figures: list[float],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Heads, pairs and layers of one layer; heads that aren't named have a similarity of 0.1."""
    key = {"kind": kind, "stack": stack, "layer": layer}
    columns = dict.fromkeys((rule.column for rule in RULES), [np.nan] * heads)
    nearest = {f"nearest_{name}": [value] * heads for name, value in key.items()}
    table = pd.DataFrame(
        {"head": range(heads), **columns, **nearest, "nearest_head": [0] * heads, **figures}
    )
    pairs = [
        {f"{name}_{side}": value for side in "ab" for name, value in key.items()}
        | {"head_a": a, "head_b": b, "js_similarity": similarities.get((a, b), 0.1)}
        for a, b in combinations(range(heads), 2)
    ]
    names = [f"{name}_{side}" for side in "ab" for name in (*key, "head")]
    pairs_table = pd.DataFrame(pairs, columns=[*names, "js_similarity"])
    return table.assign(**key), pairs_table, pd.DataFrame([key | {"heads": heads}])


def together(*layers: tuple[pd.DataFrame, ...]) -> list[pd.DataFrame]:
    return [pd.concat(frames, ignore_index=True) for frames in zip(*layers, strict=True)]


def members(found: Diagnosis) -> list[str]:
    return found.groups["heads"].tolist()


def test_groups_are_numbered_by_their_first_head_and_single_heads_have_none():
    found = diagnose(*tables({(0, 4): 0.95, (1, 2): 0.99}, heads=5))
    assert members(found) == ["0;4", "1;2"]
    assert found.groups["group"].tolist() == [0, 1]
    assert found.heads["group"].tolist() == [0, 1, 1, pd.NA, 0]
    assert found.heads["verdict"].tolist() == ["similar", "similar", "similar", "", "similar"]
    assert found.layers["groups"].tolist() == [2]


def test_the_representative_is_the_head_most_similar_to_the_others():
    found = diagnose(*tables({(0, 2): 0.92, (0, 3): 0.93, (2, 3): 0.99}))
    (group,) = found.groups.to_dict("records")
    assert group["heads"] == "0;2;3"
    assert group["size"] == 3
    assert group["representative"] == 3
    assert group["similarity_mean"] == pytest.approx((0.92 + 0.93 + 0.99) / 3)
    assert group["similarity_min"] == 0.92


def test_of_two_equal_heads_the_first_represents():
    assert diagnose(*tables({(1, 3): 0.95})).groups["representative"].tolist() == [1]


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.9, 0.95, 1.0])
def test_a_similarity_of_exactly_the_threshold_counts(threshold):
    at = diagnose(*tables({(0, 1): threshold}), similarity=threshold)
    below = diagnose(*tables({(0, 1): threshold - 1e-9}), similarity=threshold)
    assert members(at) == ["0;1"]
    assert members(below) == []


def test_a_head_joins_a_group_by_its_average_similarity():
    chain = {(0, 1): 0.98, (1, 2): 0.92, (0, 2): 0.86}
    assert members(diagnose(*tables(chain), similarity=0.89)) == ["0;1;2"]
    assert members(diagnose(*tables(chain), similarity=0.9)) == ["0;1"]


def test_layers_of_other_kinds_and_stacks_are_grouped_apart():
    found = diagnose(
        *together(
            tables({(0, 1): 0.95}, kind="causal", stack="decoder"),
            tables({(2, 3): 0.95}, kind="cross", stack="decoder"),
            tables({}, kind="bidirectional", stack="encoder"),
        )
    )
    assert found.groups[["kind", "stack", "group", "heads"]].to_numpy().tolist() == [
        ["causal", "decoder", 0, "0;1"],
        ["cross", "decoder", 0, "2;3"],
    ]
    assert found.layers["groups"].tolist() == [1, 1, 0]
    assert found.heads["group"].notna().to_numpy().nonzero()[0].tolist() == [0, 1, 6, 7]


def test_pairs_across_layers_make_no_group():
    heads, pairs, layers = together(tables({}, heads=2), tables({}, heads=2, layer=1))
    across = pairs.assign(layer_a=0, layer_b=1, js_similarity=1.0)
    found = diagnose(heads, pd.concat([pairs, across]), layers)
    assert members(found) == []


def test_layers_without_similarities_and_layers_of_one_head_have_no_groups():
    unmeasured = tables(dict.fromkeys(combinations(range(3), 2), np.nan), heads=3)
    found = diagnose(*together(unmeasured, tables({(0, 1): 0.95}, layer=1)))
    assert found.groups["layer"].tolist() == [1]
    lone = diagnose(*tables({}, heads=1))
    assert lone.groups.empty
    assert lone.heads["group"].isna().all()
    nothing = diagnose(Profile().heads(), Profile().pairs(), Profile().layers())
    assert nothing.heads.empty
    assert nothing.groups.empty


@pytest.mark.parametrize("similarity", [0, -0.1, 1.1, float("nan")])
def test_a_threshold_outside_its_range_is_an_error(similarity):
    with pytest.raises(ValueError, match=r"expected a number above 0, at most 1"):
        diagnose(*tables({}), similarity=similarity)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.flag)
def test_a_flag_is_given_from_its_threshold_on(rule):
    figures = [rule.threshold, np.nextafter(rule.threshold, 0), np.nan, 1.0]
    found = diagnose(*tables({}, **{rule.column: figures}))
    assert found.heads["flags"].tolist() == [rule.flag, "", "", rule.flag]
    assert found.flags["value"].tolist() == [rule.threshold, 1.0]
    assert found.flags["threshold"].eq(rule.threshold).all()
    columns = ["kind", "stack", "layer", "head", "flag", "value", "threshold", "evidence"]
    assert found.flags.columns.tolist() == columns


def test_a_head_may_carry_several_flags_in_a_fixed_order():
    found = diagnose(*tables({}, heads=1, sink=[1.0], entropy_normalized=[0.96], previous=[0.5]))
    assert found.heads["flags"].tolist() == ["uniform;sink;previous"]


def test_evidence_says_the_figure_and_the_other_head():
    figures = {
        "entropy_normalized": [0.9876, np.nan],
        "sink": [0.75, np.nan],
        "nearest_similarity": [0.99512, np.nan],
        "nearest_layer": [3, 3],
        "nearest_head": [2, 2],
        "previous": [0.9, np.nan],
        "next": [0.6, np.nan],
    }
    found = diagnose(*tables({}, heads=2, **figures))
    assert found.flags["evidence"].tolist() == [
        "its rows reach 0.988 of the largest possible entropy: it attends almost equally to "
        "everything it may see",
        "in 75% of the texts it puts more than 0.3 of its attention on the first key",
        "its rows are nearly those of another head (Jensen-Shannon similarity 0.9951 with layer 3 "
        "head 2)",
        "it puts 0.900 of its attention on the previous token",
        "it puts 0.600 of its attention on the next token",
    ]


def test_evidence_names_the_stream_of_a_head_elsewhere():
    heads, pairs, layers = tables({}, heads=1, stack="text", nearest_similarity=[1.0])
    heads = heads.assign(nearest_stack="vision", nearest_kind="bidirectional")
    (evidence,) = diagnose(heads, pairs, layers).flags["evidence"]
    assert "with vision bidirectional layer 0 head 0)" in evidence


def test_the_verdict_and_the_advice_speak_of_similarity_only():
    figures = {"entropy_normalized": [1.0, 0, 0, 0], "nearest_similarity": [0, 1.0, 1.0, 0]}
    found = diagnose(*tables({(1, 2): 0.95}, stack="decoder", layer=3, **figures))
    assert found.verdict == (
        "2 of 4 heads are similar to another head of their layer, in 1 group (average "
        "Jensen-Shannon similarity of 0.9 or more). Whether any of them can be removed has not "
        "been measured."
    )
    assert [advice.split(":")[0].split(";")[0] for advice in found.advice] == [
        "The largest group is heads 1, 2 of decoder layer 3 (causal)",
        "1 head with almost uniform attention",
        "2 heads with nearly the rows of another head",
    ]
    assert "head 1 represents it" in found.advice[0]
    said = " ".join(
        [found.verdict, *found.advice, *found.flags["evidence"], *found.heads["verdict"]]
    )
    assert "redundan" not in said


def test_where_nothing_stands_out_there_is_nothing_to_advise():
    found = diagnose(*tables({}), similarity=0.8)
    assert found.verdict == (
        "No two heads of a layer are similar (average Jensen-Shannon similarity of 0.8 or more) "
        "among 4 heads."
    )
    assert found.advice == []
    assert found.flags.empty
    assert found.heads["flags"].eq("").all()


# -- planted truths -----------------------------------------------------------------------------

COPIES, UNIFORM = (1, 4), 2


def tiny_bert(seed: int = 0) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    return transformers.BertModel(config)


def plant(query: nn.Linear, key: nn.Linear, dim: int) -> None:
    """Make two heads copies (their values stay their own) and one uniform."""
    source, target = (slice(head * dim, (head + 1) * dim) for head in COPIES)
    with torch.no_grad():
        for parameter in (*query.parameters(), *key.parameters()):
            parameter[target] = parameter[source]
        for parameter in query.parameters():
            parameter[UNIFORM * dim : (UNIFORM + 1) * dim] = 0


def some_ids() -> Tensor:
    return torch.randint(3, 50, (12, 30), generator=torch.Generator().manual_seed(0))


def diagnosed(model: nn.Module, batch: dict[str, Tensor]) -> Diagnosis:
    result = profile(model, [batch])
    return diagnose(result.heads(), result.pairs(), result.layers())


def flagged(found: Diagnosis, flag: str) -> list[tuple[int, int]]:
    rows = found.flags[found.flags["flag"] == flag]
    return list(rows[["layer", "head"]].itertuples(index=False, name=None))


def assert_found(found: Diagnosis, layer: int) -> None:
    assert found.groups[["layer", "group", "heads", "representative"]].to_numpy().tolist() == [
        [layer, 0, ";".join(map(str, COPIES)), COPIES[0]]
    ]
    assert found.groups["similarity_mean"].tolist() == pytest.approx([1.0], abs=1e-6)
    assert flagged(found, "copy") == [(layer, head) for head in COPIES]
    assert flagged(found, "uniform") == [(layer, UNIFORM)]
    similar = found.heads[found.heads["verdict"] == "similar"]
    assert similar[["layer", "head"]].to_numpy().tolist() == [[layer, head] for head in COPIES]


@pytest.mark.parametrize("layer", [0, 1])
def test_planted_copies_and_a_uniform_head_are_found_and_nothing_else(layer):
    model = tiny_bert()
    attention = model.encoder.layer[layer].attention.self
    plant(attention.query, attention.key, dim=8)
    assert_found(diagnosed(model, {"input_ids": some_ids()}), layer)


def test_nothing_is_found_where_nothing_is_planted():
    found = diagnosed(tiny_bert(), {"input_ids": some_ids()})
    assert found.groups.empty
    assert flagged(found, "copy") == flagged(found, "uniform") == []


class Stack(nn.Module):
    """Two layers of the reference attention, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.layers = nn.ModuleList(MultiHeadAttention(48, 6) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = nn.functional.layer_norm(x + layer(x, is_causal=True), (48,))
        return x


def test_planted_copies_in_a_causal_stack_of_the_reference_attention():
    torch.manual_seed(0)
    model = Stack()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.mul_(3)  # as trained heads, not as fresh ones: far from uniform
    plant(model.layers[1].w_q, model.layers[1].w_k, dim=8)
    assert_found(diagnosed(model, {"input_ids": some_ids()}), 1)


def test_planted_copies_in_cross_attention():
    config = transformers.T5Config(
        vocab_size=50,
        d_model=48,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_heads=6,
        initializer_factor=3.0,
    )
    torch.manual_seed(0)
    model = transformers.T5Model(config)
    attention = model.decoder.block[1].layer[1].EncDecAttention
    plant(attention.q, attention.k, dim=8)
    ids = some_ids()
    found = diagnosed(model, {"input_ids": ids, "decoder_input_ids": ids[:, :20].flip(1)})
    cross = found.groups[found.groups["kind"] == "cross"]
    assert cross[["stack", "layer", "heads"]].to_numpy().tolist() == [["decoder", 1, "1;4"]]


# -- the real model -----------------------------------------------------------------------------


def test_the_default_models_previous_token_head_is_flagged():
    source = load_model(None)
    texts = batch_texts(sample_texts()[:12], source)
    result = profile(source.model, texts.batches, token_classes=texts.token_classes)
    found = diagnose(result.heads(), result.pairs(), result.layers())
    strongest = found.heads.loc[found.heads["previous"].idxmax()]
    assert strongest["previous"] > 0.9
    assert "previous" in strongest["flags"].split(";")
    measures = ["importance", "importance_signed", "impact", "impact_low", "impact_high"]
    columns = result.heads().columns.tolist()
    settled = columns.index("nearest_similarity") + 1
    said = [*measures, "group", "roles", "verdict", "flags"]
    assert found.heads.columns.tolist() == columns[:settled] + said + columns[settled:]
    assert found.heads[measures].isna().all(axis=None)
