"""The profile against plain NumPy, padding, merging, sampling, names, refusals, the real model."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations
from operator import add

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import save_file
from scipy.spatial.distance import jensenshannon
from torch import Tensor, nn
from torch.nn import functional as F

from headprobe.attention import MultiHeadAttention
from headprobe.capture import AttentionCall, Capture
from headprobe.errors import HeadprobeError
from headprobe.inputs import batch_texts, load_model, sample_texts
from headprobe.profile import HEAD_KEY, Profile, Sampling, fingerprint, profile
from headprobe.profile.names import Place, places
from headprobe.profile.observer import Observer
from headprobe.profile.texts import read_batch
from headprobe.statistics import MEASURES, STATISTICS
from tests.models import make

NAMES = [statistic.name for statistic in STATISTICS]
CLASSES = {"special": [1, 2], "punctuation": [3]}
TOLERANCE = 2e-6

# Weights that are not near zero, so that heads attend to different things.
BERT = transformers.BertConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.5,
)
GPT2 = transformers.GPT2Config(
    vocab_size=20, n_embd=16, n_layer=2, n_head=4, n_positions=128, initializer_range=0.5
)
LLAMA = transformers.LlamaConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.5,
)
T5 = transformers.T5Config(
    vocab_size=20,
    d_model=16,
    d_kv=4,
    d_ff=16,
    num_layers=2,
    num_heads=4,
    initializer_factor=1.0,
)
CONFIGS = {
    "bert": (transformers.BertModel, BERT),
    "gpt2": (transformers.GPT2Model, GPT2),
    "llama": (transformers.LlamaModel, LLAMA),
    "t5": (transformers.T5Model, T5),
}


def build(name: str, implementation: str = "sdpa", seed: int = 0) -> nn.Module:
    family, config = CONFIGS[name]
    torch.manual_seed(seed)
    return family._from_config(config, attn_implementation=implementation).eval()


def some_texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Token ids; each text begins and ends with a special token and has punctuation."""
    rng = np.random.default_rng(seed)
    inner = [rng.integers(3, 20, size=max(0, length - 2)).tolist() for length in lengths]
    return [[1, *ids, 2][:length] for ids, length in zip(inner, lengths, strict=True)]


def padded(texts: Sequence[Sequence[int]], side: str = "right") -> dict[str, Tensor]:
    width = max(map(len, texts))

    def fill(rows: list[list[int]]) -> Tensor:
        space = [[0] * (width - len(row)) for row in rows]
        pairs = zip(rows, space, strict=True)
        return torch.tensor([s + r if side == "left" else r + s for r, s in pairs])

    return {
        "input_ids": fill([list(text) for text in texts]),
        "attention_mask": fill([[1] * len(text) for text in texts]),
    }


def batch_for(name: str, texts: Sequence[Sequence[int]], side: str = "right") -> dict[str, Tensor]:
    batch = padded(texts, side)
    if name == "t5":  # a decoder's texts of other lengths
        answers = padded([[0, *text[: 2 + len(text) // 2]] for text in texts])
        batch |= {f"decoder_{key}": value for key, value in answers.items()}
    return batch


def measured(
    name: str,
    batches: Sequence[Mapping[str, Tensor]],
    implementation: str = "sdpa",
    sampling: Sampling | None = None,
) -> Profile:
    model = build(name, implementation)
    return profile(model, batches, sampling=sampling, token_classes=CLASSES)


def assert_same_tables(first: Profile, second: Profile, tolerance: float = TOLERANCE) -> None:
    for table in ("heads", "pairs", "layers"):
        one, other = (getattr(p, table)() for p in (first, second))
        pd.testing.assert_frame_equal(one, other, rtol=tolerance, atol=tolerance, obj=table)


# -- against NumPy ------------------------------------------------------------------------------


def own_maps(name: str, text: list[int]) -> dict[tuple[str, str, int], np.ndarray]:
    """(kind, stack, layer) -> the model's own weights for one text, [heads, queries, keys]."""
    with torch.no_grad():
        out = build(name, "eager")(**batch_for(name, [text]), output_attentions=True)
    parts = {
        "bert": [("bidirectional", "", "attentions")],
        "gpt2": [("causal", "", "attentions")],
        "llama": [("causal", "", "attentions")],
        "t5": [
            ("bidirectional", "encoder", "encoder_attentions"),
            ("causal", "decoder", "decoder_attentions"),
            ("cross", "decoder", "cross_attentions"),
        ],
    }[name]
    return {
        (kind, stack, layer): weights[0].double().numpy()
        for kind, stack, field in parts
        for layer, weights in enumerate(out[field])
    }


def seen_keys(kind: str, queries: int, keys: int) -> np.ndarray:
    return np.tri(queries, keys, dtype=bool) if kind == "causal" else np.ones((queries, keys), bool)


def row_figures(weights: np.ndarray, kind: str, key_ids: list[int]) -> dict[str, tuple]:
    """Statistic -> the values of the rows that count, [heads, rows], and their weights, [rows]."""
    queries, keys = weights.shape[1:]
    i, j = np.indices((queries, keys))
    seen = seen_keys(kind, queries, keys)
    choice = seen.sum(axis=1) >= 2
    logs = np.log(np.where(weights > 0, weights, 1.0))
    entropy = -(weights * logs).sum(axis=-1)
    every = np.ones(queries)
    figures = {
        "entropy": (entropy, every),
        "entropy_normalized": (entropy / np.log(np.maximum(seen.sum(axis=1), 2)), choice),
        "confidence": (weights.max(axis=-1), every),
        "effective_support": (np.exp(entropy), every),
        "first": (weights[..., 0], every),
        "sink": (weights[..., 0].mean(axis=1, keepdims=True) > 0.3, np.ones(1) * (keys >= 16)),
    }
    for group, ids in CLASSES.items():
        figures[group] = (weights[..., np.isin(key_ids, ids)].sum(axis=-1), every)
    if kind == "cross":
        return figures
    far = np.abs(i - j)
    uniform = (seen * far).sum(axis=1) / seen.sum(axis=1)
    distance = (weights * far).sum(axis=-1)
    figures["distance"] = (distance, every)
    # A ratio of sums: total and count of unlike kind.
    figures["distance_ratio"] = (distance / np.where(uniform > 0, uniform, 1), uniform * choice)
    for offset, column in ((-1, "previous"), (0, "current"), (1, "next")):
        diagonal = np.diagonal(weights, offset, axis1=1, axis2=2)
        figures[column] = (diagonal, np.ones(diagonal.shape[1]))
    return figures


def expected_heads(name: str, texts: list[list[int]]) -> dict[tuple, dict[str, np.ndarray]]:
    sums: dict = {}
    for text in texts:
        batch = batch_for(name, [text])
        for key, weights in own_maps(name, text).items():
            in_decoder = key[1] == "decoder" and key[0] != "cross"
            ids = batch["decoder_input_ids" if in_decoder else "input_ids"][0].tolist()
            for column, (values, counts) in row_figures(weights, key[0], ids).items():
                total = sums.setdefault(key, {}).setdefault(column, [0.0, 0.0])
                total[0] = total[0] + (values * counts).sum(axis=1)
                total[1] = total[1] + counts.sum()
    return {
        key: {column: total / count for column, (total, count) in columns.items() if count}
        for key, columns in sums.items()
    }


SHORT = some_texts(17, 5, 9, 1, 2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_heads_equal_plain_numpy_on_the_models_own_attentions(name, implementation):
    table = measured(name, [batch_for(name, SHORT)], implementation).heads()
    expected = expected_heads(name, SHORT)
    found = dict(list(table.groupby(list(HEAD_KEY[:3]))))
    assert set(found) == set(expected)
    for key, rows in found.items():
        assert rows["head"].tolist() == [0, 1, 2, 3]
        for column in set(NAMES) - {"output_norm"}:
            want = expected[key].get(column, np.full(4, np.nan))
            np.testing.assert_allclose(
                rows[column],
                want,
                rtol=0,
                atol=5e-6 * max(1, np.nanmax(want, initial=0)),
                err_msg=f"{key} {column}",
            )


def expected_similarity(name: str, texts: list[list[int]]) -> dict[tuple, list[float]]:
    """(layer, head, layer, head) of self-attention layers -> the measures, over all rows."""
    rows: dict = {}
    for text in texts:
        maps = {key: weights for key, weights in own_maps(name, text).items() if key[0] != "cross"}
        heads = [(*key, head) for key, weights in maps.items() for head in range(len(weights))]
        for a, b in combinations(heads, 2):
            if a[:2] != b[:2]:
                continue
            p, q = (maps[head[:3]][head[3]] for head in (a, b))
            choice = seen_keys(a[0], *p.shape).sum(axis=1) >= 2
            for x, y in zip(p[choice], q[choice], strict=True):
                js = jensenshannon(x, y, base=2) ** 2
                cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
                rows.setdefault((a, b), []).append((1 - js, 1 - np.abs(x - y).sum() / 2, cosine))
    return {pair: np.mean(values, axis=0) for pair, values in rows.items()}


@pytest.mark.parametrize("sampling", [None, Sampling(rows=None)])
@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_equal_plain_numpy_within_and_across_layers(name, sampling):
    texts = some_texts(9, 3, 20)
    table = measured(name, [batch_for(name, texts)], sampling=sampling).pairs()
    heads = [table[[f"{column}_{side}" for column in HEAD_KEY]] for side in "ab"]
    keys = list(zip(*(side.itertuples(index=False, name=None) for side in heads), strict=True))
    assert len(set(keys)) == len(keys)
    expected = expected_similarity(name, texts)
    assert set(expected) <= set(keys)
    for key, row in zip(keys, table[list(MEASURES)].to_numpy(), strict=True):
        if key in expected:
            np.testing.assert_allclose(row, expected[key], rtol=0, atol=1e-5, err_msg=str(key))
        elif "cross" not in (key[0][0], key[1][0]):
            assert np.isnan(row).all(), key  # an encoder's head and a decoder's
        else:
            assert (key[0][0] == key[1][0]) == (not np.isnan(row).any()), key


@pytest.mark.parametrize("name", CONFIGS)
def test_output_norm_is_the_norm_of_each_heads_part_of_the_output(name):
    model = build(name, "eager")
    linear = {
        "bert": "attention.output.dense",
        "gpt2": "attn.c_proj",
        "llama": "self_attn.o_proj",
        "t5": "Attention.o",
    }[name]
    norms: dict[str, Tensor] = {}

    def note(site: str, module: nn.Module, z: Tensor) -> None:
        weight = (
            module.weight
            if isinstance(module, transformers.pytorch_utils.Conv1D)
            else module.weight.t()
        )
        parts = torch.einsum(
            "nhd,hde->nhe", z[0].unflatten(-1, (4, -1)), weight.unflatten(0, (4, -1))
        )
        norms[site] = parts.norm(dim=-1).mean(dim=0)

    for site, module in model.named_modules():
        if site.endswith(linear):
            module.register_forward_pre_hook(lambda m, args, site=site: note(site, m, args[0]))
    batch = batch_for(name, some_texts(11))
    table = profile(model, [batch]).heads()
    assert len(norms) == table["site"].nunique()
    for site, rows in table.groupby("site"):
        (want,) = (
            norm for owner, norm in norms.items() if owner.startswith(site.removesuffix(".self"))
        )
        np.testing.assert_allclose(rows["output_norm"], want, rtol=1e-5)


# -- columns ------------------------------------------------------------------------------------


def test_columns_are_those_of_the_output_contract():
    result = measured("bert", [padded(SHORT)])
    nearest = ["nearest_kind", "nearest_stack", "nearest_layer", "nearest_head"]
    spread = ["entropy", "entropy_normalized", "confidence", "effective_support"]
    where = ["distance", "distance_ratio", "previous", "current", "next", "first", "special"]
    heads = ["kind", "stack", "layer", "head", "site", "kv_group", *spread, *where, "punctuation"]
    heads += ["sink", "output_norm", *nearest, "nearest_similarity", "missing"]
    heads += ["distance_unnormalized", "distance_unit"]
    pairs = [f"{name}_{side}" for side in "ab" for name in HEAD_KEY]
    pairs += ["js_similarity", "overlap", "cosine", "cka", "output_cosine", "js_null", "js_no_sink"]
    layers = ["kind", "stack", "layer", "heads", "entropy_mean", "entropy_normalized_mean"]
    layers += ["distance_mean", "js_similarity_mean", "generalized_js"]
    intervals = [*HEAD_KEY, "statistic", "value", "low", "high", "reliability"]
    expected = {"heads": heads, "pairs": pairs, "layers": layers, "intervals": intervals}
    for table, columns in expected.items():
        assert getattr(result, table)().columns.tolist() == columns
        assert getattr(Profile(), table)().columns.tolist() == columns  # also where nothing is
    assert len(result.pairs()) == 8 * 7 // 2


def test_nearest_is_the_most_similar_other_head_in_any_layer():
    result = measured("llama", [padded(SHORT)])
    heads, pairs = result.heads(), result.pairs()
    for head in heads.to_dict("records"):
        rows = [
            (row["js_similarity"], row[f"layer_{there}"], row[f"head_{there}"])
            for row in pairs.to_dict("records")
            for here, there in ("ab", "ba")
            if (row[f"layer_{here}"], row[f"head_{here}"]) == (head["layer"], head["head"])
        ]
        assert len(rows) == 7
        nearest = (head["nearest_similarity"], head["nearest_layer"], head["nearest_head"])
        assert nearest == max(rows)
        assert (head["nearest_kind"], head["nearest_stack"]) == ("causal", "")


def test_layers_are_means_over_their_heads_and_pairs():
    result = measured("gpt2", [padded(SHORT)])
    heads, pairs = result.heads(), result.pairs()
    within = pairs[pairs["layer_a"] == pairs["layer_b"]].groupby("layer_a")["js_similarity"].mean()
    means = heads.groupby("layer")[["entropy", "entropy_normalized", "distance"]].mean()
    table = result.layers().set_index("layer")
    assert table["heads"].tolist() == [4, 4]
    for column in means:
        np.testing.assert_allclose(table[f"{column}_mean"], means[column], rtol=1e-12)
    np.testing.assert_allclose(table["js_similarity_mean"], within, rtol=1e-12)
    assert ((table["generalized_js"] > 0) & (table["generalized_js"] < np.log(4))).all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_heads_that_share_keys_have_one_kv_group(implementation):
    heads = measured("llama", [padded(SHORT)], implementation).heads()
    assert heads["kv_group"].tolist() == [0, 0, 1, 1] * 2
    assert (
        measured("bert", [padded(SHORT)], implementation).heads()["kv_group"].tolist()
        == [0, 1, 2, 3] * 2
    )


def test_kinds_and_stacks_of_an_encoder_and_a_decoder():
    result = measured("t5", [batch_for("t5", SHORT)])
    layers = result.layers()[["kind", "stack", "layer"]].to_records(index=False).tolist()
    assert sorted(layers) == [
        ("bidirectional", "encoder", 0),
        ("bidirectional", "encoder", 1),
        ("causal", "decoder", 0),
        ("causal", "decoder", 1),
        ("cross", "decoder", 0),
        ("cross", "decoder", 1),
    ]
    cross = result.heads().query("kind == 'cross'")
    empty = ["distance", "distance_ratio", "previous", "current", "next"]
    assert cross[empty].isna().all(axis=None)
    assert cross[["entropy", "first", "output_norm"]].notna().all(axis=None)


def test_a_token_class_that_no_key_is_in_has_an_empty_cell():
    batch = {**padded([[1, 5, 2]]), "decoder_input_ids": torch.tensor([[0, 5, 6]])}
    heads = measured("t5", [batch]).heads().set_index("kind")
    assert heads.loc[["bidirectional", "cross"], "special"].notna().all()
    assert heads.loc["causal", "special"].isna().all()
    assert heads["punctuation"].isna().all()
    assert profile(build("t5"), [batch]).heads()["special"].isna().all()  # no classes given


# -- padding ------------------------------------------------------------------------------------

MIXED = some_texts(7, 20, 3, 1, 80)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_padded_batch_has_the_figures_of_the_texts_alone(name, side, implementation):
    together = measured(name, [batch_for(name, MIXED, side)], implementation)
    alone = measured(name, [batch_for(name, [text]) for text in MIXED], implementation)
    assert_same_tables(together, alone)
    assert together.tokens == alone.tokens == sum(map(len, MIXED))
    for one, other in zip(together.measured, alone.measured, strict=True):
        for statistic, sums in one.statistics.items():
            assert torch.equal(sums.count, other.statistics[statistic].count), statistic


def test_right_padding_by_forty_more_changes_nothing():
    batch = padded(SHORT)
    wider = {name: F.pad(value, (0, 40)) for name, value in batch.items()}
    assert_same_tables(measured("bert", [batch]), measured("bert", [wider]))


class Absolute(nn.Module):
    """Counts positions from the start of the padding, and can't be told otherwise."""

    def __init__(self, *, uses_mask: bool = True, positions: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.places = nn.Embedding(128, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.uses_mask, self.positions = uses_mask, positions

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if self.positions:
            x = x + self.places(torch.arange(input_ids.shape[1]))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mask = None
        if self.uses_mask and attention_mask is not None:
            mask = attention_mask[:, None, None].bool()
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(z.transpose(1, 2).flatten(2))


def test_absolute_positions_that_cant_be_told_are_refused_when_padded_on_the_left():
    torch.manual_seed(0)
    model = Absolute()
    with pytest.raises(HeadprobeError, match="counts positions from the start of the padding"):
        profile(model, [padded(SHORT, "left")])
    profile(model, [padded(SHORT, "right")])
    profile(model, [padded([[1, 2, 3]], "left")])


def test_left_padding_is_taken_where_positions_dont_count():
    torch.manual_seed(0)
    model = Absolute(positions=False)
    left, right = (profile(model, [padded(SHORT, side)]) for side in ("left", "right"))
    assert_same_tables(left, right)


def test_a_decoder_padded_on_the_left_is_tried_out_too():
    config = transformers.BartConfig(
        vocab_size=20,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        init_std=0.5,
    )
    torch.manual_seed(0)
    model = transformers.BartModel(config)
    answers = padded(some_texts(9, 4), "left")
    batch = padded(some_texts(9, 9)) | {f"decoder_{name}": v for name, v in answers.items()}
    with pytest.raises(HeadprobeError, match="pad on the right"):
        profile(model, [batch])


def test_a_model_that_ignores_the_mask_is_refused():
    torch.manual_seed(0)
    with pytest.raises(HeadprobeError, match="attends to padding"):
        profile(Absolute(uses_mask=False), [padded(SHORT)])


def test_a_text_of_padding_only_is_refused():
    batch = padded(SHORT)
    batch["attention_mask"][2] = 0
    with pytest.raises(HeadprobeError, match="text 2 of a batch has no token in 'input_ids'"):
        measured("bert", [batch])


def test_torchs_own_padding_mask_is_understood():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    src = torch.randn(2, 6, 8)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    together = profile(model, [{"src": src, "src_key_padding_mask": padding}])
    alone = profile(model, [{"src": src[:1]}, {"src": src[1:, :4]}])
    assert_same_tables(together, alone)


def test_an_input_of_another_name_takes_the_attention_mask_of_its_shape():
    class Renamed(Absolute):
        def forward(self, idx: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(idx, attention_mask)

    torch.manual_seed(0)
    model = Renamed()
    batches = [padded(SHORT), *(padded([text]) for text in SHORT)]
    batches = [{"idx": b["input_ids"], "attention_mask": b["attention_mask"]} for b in batches]
    assert_same_tables(profile(model, batches[:1]), profile(model, batches[1:]))


def test_positions_of_unknown_origin_are_left_out_of_a_padded_batch():
    class Latents(Absolute):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            latents = super().forward(torch.arange(3).expand(len(input_ids), -1))
            return super().forward(input_ids, attention_mask) + latents.mean(dim=1, keepdim=True)

    torch.manual_seed(0)
    result = profile(Latents(), [padded(SHORT)])
    assert "from which input" in result.left_out[""]
    assert result.measured == ()  # nor is the module's other call there
    assert result.pair_sums == {}


# -- merging and sampling -----------------------------------------------------------------------

LONG = some_texts(70, 90, 66, 12, 100, 5, 64, 65)


def assert_same_sums(first: Profile, second: Profile) -> None:
    assert (first.texts, first.tokens) == (second.texts, second.tokens)
    assert first.class_tokens == second.class_tokens
    assert first.settings == second.settings
    assert first.left_out == second.left_out
    assert first.pair_sums.keys() == second.pair_sums.keys()
    pairs = [(first.pair_sums[key], second.pair_sums[key]) for key in first.pair_sums]
    for one, other in zip(first.measured, second.measured, strict=True):
        assert (one.address, one.kind, one.heads) == (other.address, other.kind, other.heads)
        assert list(one.statistics) == list(other.statistics)
        pairs += [(one.statistics[name], other.statistics[name]) for name in one.statistics]
    for a, b in pairs:
        torch.testing.assert_close(a.total, b.total, rtol=1e-12, atol=1e-12)
        assert torch.equal(a.count, b.count)


def test_profiles_add_up_in_any_order_and_grouping():
    batches = [padded(LONG[:2]), padded(LONG[2:3]), padded(LONG[3:])]
    whole = measured("bert", batches)
    a, b, c = (measured("bert", [batch]) for batch in batches)
    for other in (a + b + c, a + (b + c), c + a + b, (b + c) + a):
        assert_same_sums(whole, other)
    assert_same_sums(whole, reduce(add, [a, b, c], Profile()))
    assert_same_sums(whole, whole + Profile())
    assert_same_sums(whole, whole + measured("bert", []))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_batch_size_changes_nothing(name, size):
    sampling = Sampling(rows=16, rows_across=4)
    whole = measured(name, [padded(LONG)], sampling=sampling)
    parts = [padded(LONG[i : i + size]) for i in range(0, len(LONG), size)]
    assert_same_tables(whole, measured(name, parts, sampling=sampling))


def test_sampled_rows_depend_on_the_text_and_the_seed_alone():
    rows = {
        seed: measured("bert", [padded(LONG)], sampling=Sampling(seed=seed)).pairs()
        for seed in (0, 1)
    }
    again = measured("bert", [padded(LONG[::-1])], sampling=Sampling(seed=0)).pairs()
    pd.testing.assert_frame_equal(rows[0], again, rtol=0, atol=TOLERANCE)
    assert (rows[0]["js_similarity"] - rows[1]["js_similarity"]).abs().max() > 1e-4


def test_how_many_rows_are_compared():
    def counts(sampling: Sampling) -> dict[bool, set[float]]:
        sums = measured("bert", [padded(LONG)], sampling=sampling).pair_sums
        groups: dict[bool, set[float]] = {True: set(), False: set()}
        for (first, second), pair in sums.items():
            groups[first == second].add(float(pair.count.sum()))
        return groups

    short = 12 + 5 + 64
    assert counts(Sampling(rows=16)) == {True: {5 * 16.0 + short}, False: {5 * 16.0 + short}}
    assert counts(Sampling(rows_across=3)) == {True: {5 * 16.0 + short}, False: {8 * 3.0}}
    tokens = float(sum(map(len, LONG)))
    assert counts(Sampling(rows=None)) == {True: {tokens}, False: {tokens}}


def test_types_and_padding_of_the_token_ids_dont_change_a_texts_hash():
    batch = padded(LONG)
    narrow = {**batch, "input_ids": batch["input_ids"].int()}
    typed = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}
    whole = measured("bert", [batch])
    assert_same_sums(whole, measured("bert", [narrow]))
    assert_same_sums(whole, measured("bert", [typed]))


def test_beyond_the_limit_of_pairs_layers_are_chosen():
    config = transformers.BertConfig(**{**BERT.to_dict(), "num_hidden_layers": 5})
    torch.manual_seed(0)
    model = transformers.BertModel(config)

    def pairs(limit: int, seed: int = 0, texts: int = 4) -> set:
        sampling = Sampling(pairs=limit, seed=seed)
        batches = [padded([text]) for text in SHORT[:texts]]
        return set(profile(model, batches, sampling=sampling).pair_sums)

    within = {key for key in pairs(1000) if key[0] == key[1]}
    assert len(within) == 5
    assert len(pairs(1000)) == 5 + 10
    assert pairs(10) == within
    some = pairs(5 * 6 + 4 * 16 + 15)
    assert within < some
    assert len(some) == 5 + 4
    assert some == pairs(5 * 6 + 4 * 16 + 15, texts=1)
    assert some != pairs(5 * 6 + 4 * 16 + 15, seed=1)
    sampling = Sampling(pairs=5 * 6 + 4 * 16)
    table = profile(model, [padded(SHORT)], sampling=sampling).pairs()
    assert len(table) == 20 * 19 // 2
    assert table["js_similarity"].notna().sum() == 5 * 6 + 4 * 16


def test_profiles_of_other_models_or_settings_dont_merge():
    first = measured("bert", [padded(SHORT)])
    other_model = profile(build("bert", seed=1), [padded(SHORT)], token_classes=CLASSES)
    with pytest.raises(HeadprobeError, match="different model"):
        first + other_model
    with pytest.raises(HeadprobeError, match="different seed can't be merged: 0 and 3"):
        first + measured("bert", [padded(SHORT)], sampling=Sampling(seed=3))
    with pytest.raises(HeadprobeError, match="different rows can't be merged: 16 and None"):
        first + measured("bert", [padded(SHORT)], sampling=Sampling(rows=None))
    with pytest.raises(HeadprobeError, match="different classes"):
        first + profile(build("bert"), [padded(SHORT)])


def test_the_fingerprint_sees_one_changed_weight_and_a_permutation():
    model = build("bert")
    before = fingerprint(model)
    assert before == fingerprint(build("bert", "eager"))
    weight = model.encoder.layer[1].output.dense.weight
    with torch.no_grad():
        weight[7, 9] += 1e-3
    changed = fingerprint(model)
    with torch.no_grad():
        weight[[3, 4]] = weight[[4, 3]]
    assert len({before, changed, fingerprint(model), fingerprint(model.half())}) == 4


def test_a_saved_profile_loads_as_it_was(tmp_path):
    result = measured("t5", [batch_for("t5", SHORT)])
    result.save(tmp_path / "profile.safetensors")
    loaded = Profile.load(tmp_path / "profile.safetensors")
    assert_same_sums(result, loaded)
    assert_same_tables(result, loaded, 0)
    pd.testing.assert_frame_equal(result.intervals(), loaded.intervals())
    assert_same_sums(result + result, loaded + result)
    assert [vars(a) | {"statistics": 0} for a in result.measured] == [
        vars(b) | {"statistics": 0} for b in loaded.measured
    ]
    Profile().save(tmp_path / "empty.safetensors")
    assert Profile.load(tmp_path / "empty.safetensors") == Profile()


def test_what_is_no_profile_is_not_loaded(tmp_path, monkeypatch):
    path = tmp_path / "profile.safetensors"
    with pytest.raises(HeadprobeError, match="is not a profile that can be read"):
        Profile.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(HeadprobeError, match="is not a profile that can be read"):
        Profile.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(HeadprobeError, match="is not a headprobe profile"):
        Profile.load(path)
    monkeypatch.setattr("headprobe.profile.sums._FORMAT", 99)
    Profile().save(path)
    monkeypatch.undo()
    with pytest.raises(HeadprobeError, match="format 99, expected"):
        Profile.load(path)


# -- names --------------------------------------------------------------------------------------

NAMED = {
    "nested numbers": (
        ["t.block.0.layer.0.attn", "t.block.1.layer.0.attn"],
        [("", 0), ("", 1)],
    ),
    "a wrapper": (
        ["0.model.layer.0.self", "0.model.layer.1.self", "0.model.layer.2.self"],
        [("", 0), ("", 1), ("", 2)],
    ),
    "one module again and again": (["groups.0.layers.0.attn"] * 3, [("", 0), ("", 1), ("", 2)]),
    "two towers": (
        ["text_model.layers.0.a", "text_model.layers.1.a", "vision_model.layers.0.a"],
        [("text", 0), ("text", 1), ("vision", 0)],
    ),
    "the only map of a hybrid": (["model.layers.3.attn"], [("", 3)]),
    "some maps of a hybrid": (["model.layers.3.attn", "model.layers.7.attn"], [("", 3), ("", 7)]),
    "the only map in a wrapper": (["0.model.layers.3.attn"], [("", 3)]),
    "no numbers": (["attn"], [("", 0)]),
    "the model itself": ([""], [("", 0)]),
    "names instead of numbers": (["lower.attn", "upper.attn"], [("lower", 0), ("upper", 0)]),
    "stages": (
        ["layers.0.blocks.0.a", "layers.0.blocks.1.a", "layers.1.blocks.0.a"],
        [("", 0), ("", 1), ("", 2)],
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_stack_and_layer_from_module_names(case):
    sites, expected = NAMED[case]
    assert places(sites, ["causal"] * len(sites)) == [Place(*place) for place in expected]


@pytest.mark.parametrize("blocks", [1, 2])
def test_layers_of_an_encoder_and_a_decoder_of_any_depth(blocks):
    sites, kinds, expected = [], [], []
    for i in range(blocks):
        sites.append(f"encoder.block.{i}.layer.0.SelfAttention")
        kinds.append("bidirectional")
        expected.append(("encoder", i))
    for i in range(blocks):
        sites += [f"decoder.block.{i}.layer.0.SelfAttention", f"decoder.block.{i}.layer.1.Cross"]
        kinds += ["causal", "cross"]
        expected += [("decoder", i)] * 2
    assert [tuple(place) for place in places(sites, kinds)] == expected


def test_a_place_and_a_kind_name_one_layer_whatever_the_names():
    rng = np.random.default_rng(0)
    parts = ["0", "1", "2", "layers", "encoder", "attn", "text_model"]
    for _ in range(300):
        count = rng.integers(1, 9)
        sites = [".".join(rng.choice(parts, size=rng.integers(1, 6))) for _ in range(count)]
        kinds = rng.choice(["causal", "cross"], size=count).tolist()
        keys = list(zip(places(sites, kinds), kinds, strict=True))
        assert len(set(keys)) == count, (sites, keys)


def test_a_shared_layer_is_a_layer_each_time_it_is_called():
    config = transformers.AlbertConfig(
        vocab_size=20,
        embedding_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = transformers.AlbertModel(config)
    result = profile(model, [padded(SHORT)])
    assert result.layers()["layer"].tolist() == [0, 1, 2]
    assert result.heads()["site"].nunique() == 1
    assert result.heads().groupby("layer")["entropy"].mean().nunique() == 3


def test_two_towers_are_two_stacks():
    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 20, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(0)
    batch = {**padded(some_texts(3, 7)), "pixel_values": torch.randn(2, 3, 8, 8)}
    result = profile(transformers.CLIPModel(config), [batch])
    keys = result.layers()[["kind", "stack", "layer"]].to_records(index=False).tolist()
    assert sorted(keys) == [
        ("bidirectional", "vision", 0),
        ("bidirectional", "vision", 1),
        ("causal", "text", 0),
        ("causal", "text", 1),
    ]


# -- the model stays as it is -------------------------------------------------------------------


def test_a_model_in_training_with_dropout_has_the_profile_of_evaluation():
    model = build("bert").train()
    model.encoder.layer[0].eval()
    flags = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    result = profile(model, [padded(SHORT)], token_classes=CLASSES)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert_same_sums(result, measured("bert", [padded(SHORT)]))


def test_training_flags_come_back_after_an_exception():
    model = build("bert").train()
    model.pooler.eval()
    flags = [module.training for module in model.modules()]
    with pytest.raises(IndexError):
        profile(model, [padded(SHORT), padded([[99]])])
    assert [module.training for module in model.modules()] == flags
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_low_precision_models_are_measured(implementation):
    model = build("bert", implementation)
    whole = profile(model, [padded(LONG)]).heads()
    half = profile(model.bfloat16(), [padded(LONG)])
    assert half.left_out == {}
    # The input of the second layer has drifted; the first is the same to bfloat16's precision.
    first = whole["layer"] == 0
    np.testing.assert_allclose(half.heads()["entropy"][first], whole["entropy"][first], atol=0.05)


def test_double_precision_models_are_measured():
    single, double = (
        measured("bert", [padded(SHORT)]),
        profile(build("bert").double(), [padded(SHORT)]),
    )
    columns = ["entropy", "output_norm", "nearest_similarity"]
    difference = (single.heads()[columns] - double.heads()[columns]).abs()
    assert difference.max(axis=None) < 1e-5


# -- what can't be shown ------------------------------------------------------------------------


class Halved(nn.Module):
    """Two layers; the weights of the second are halved, so that its rows do not sum to 1."""

    def __init__(self, *, plain: bool = True) -> None:
        super().__init__()
        self.plain = Absolute() if plain else None
        self.halved = nn.Linear(8, 24)
        self.embed = nn.Embedding(20, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.plain is not None:
            x = x + self.plain(input_ids)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.halved(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2)
        weights = scores.softmax(dim=-1) / 2
        return (weights @ v).transpose(1, 2).flatten(2)


def test_rows_that_dont_sum_to_one_are_left_out_with_the_reason():
    torch.manual_seed(0)
    model = Halved()
    batches = [{"input_ids": torch.tensor([text])} for text in SHORT[:2]]
    result = profile(model, batches)
    assert list(result.left_out) == [""]
    assert "don't sum to 1" in result.left_out[""]
    assert result.heads()["site"].unique().tolist() == ["plain"]
    assert {a[0] for key in result.pair_sums for a in key} == {"plain"}


def test_a_batch_axis_that_is_not_first_is_left_out_with_the_reason():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8)
    result = profile(model, [{"src": torch.randn(5, 2, 8)}])
    assert "its map has 2 sequences, the batch has 5 texts" in result.left_out["self_attn"]
    assert "batch_first=False" in result.left_out["self_attn"]
    assert result.heads().empty
    assert result.layers().empty


def test_positions_first_gives_what_batch_first_gives():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=20)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    src, padding = torch.randn(7, 3, 16), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    inputs = {"src": src, "src_key_padding_mask": padding}
    second = profile(model, [inputs], batch_first=False)
    for layer in model.layers:
        layer.self_attn.batch_first = True
    first = profile(model, [inputs | {"src": src.transpose(0, 1).contiguous()}])
    assert second.left_out == first.left_out == {}
    assert second.tokens == first.tokens == 19
    pd.testing.assert_frame_equal(second.heads(), first.heads(), atol=2e-6)
    pd.testing.assert_frame_equal(second.pairs(), first.pairs(), atol=2e-6)


def test_a_model_of_which_nothing_remains_has_empty_tables(tmp_path):
    torch.manual_seed(0)
    result = profile(Halved(plain=False), [{"input_ids": torch.tensor([[3, 4, 5]])}])
    assert result.measured == ()
    assert result.left_out.keys() == {""}
    assert result.texts == 1
    for table in (result.heads(), result.pairs(), result.layers(), result.intervals()):
        assert table.empty
    result.save(tmp_path / "profile")
    assert Profile.load(tmp_path / "profile") == result


def test_a_layer_left_out_of_one_batch_is_left_out_of_all():
    torch.manual_seed(0)
    model = Halved()
    good = profile(model, [{"input_ids": torch.tensor([[3, 4, 5]])}])
    refused = replace(good, left_out={"plain": "a reason"}, measured=(), pair_sums={})
    for both in (good + refused, refused + good):
        assert both.measured == ()
        assert both.pair_sums == {}
        assert both.left_out.keys() == {"", "plain"}


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (padded(SHORT), "a batch is a str: expected the keywords"),
        ([torch.zeros(2, 3)], "a batch is a Tensor: expected the keywords"),
    ],
)
def test_batches_that_are_no_mappings(batches, message):
    with pytest.raises(TypeError, match=message):
        profile(build("bert"), batches)


def test_batches_that_dont_fit():
    with pytest.raises(ValueError, match="a batch has 'attention_mask': expected a tensor"):
        profile(build("bert"), [{"attention_mask": torch.ones(2, 3)}])
    batch = {**padded(SHORT), "attention_mask": torch.ones(5, 3)}
    with pytest.raises(ValueError, match="expected the same axes"):
        profile(build("bert"), [batch])


def test_a_missed_name_or_number_is_an_error():
    with pytest.raises(ValueError, match="token class 'specials': expected special or punct"):
        profile(build("bert"), [padded(SHORT)], token_classes={"specials": [1]})
    with pytest.raises(ValueError, match="rows is 0: expected 1 or more, or None"):
        Sampling(rows=0)


class Written(nn.Module):
    """Attention written out: keys may be pooled, dropout forced, a second softmax be there."""

    def __init__(self, *, pool: int = 1, dropout: float = 0.0, extra: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.qkv = nn.Linear(8, 24)
        self.pool, self.dropout, self.extra = pool, dropout, extra

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.qkv(self.embed(input_ids)).unflatten(-1, (2, 12)).transpose(1, 2)
        q, k, v = x.chunk(3, dim=-1)
        k, v = k[:, :, :: self.pool], v[:, :, :: self.pool]
        weights = F.dropout((q @ k.mT).softmax(dim=-1), self.dropout, training=True)
        z = weights @ v
        return z + (q @ k.mT).softmax(dim=-1).sum() if self.extra else z


def written(**options: float) -> Profile:
    torch.manual_seed(0)
    return profile(Written(**options), [{"input_ids": torch.tensor([some_texts(8)[0]])}])


def test_pooled_keys_are_another_sequence():
    heads = written(pool=2).heads()
    assert heads["kind"].eq("cross").all()
    assert heads[["distance", "previous"]].isna().all(axis=None)


def test_what_one_batch_cant_tell_another_does():
    torch.manual_seed(0)
    pooled, encoder = Written(pool=2), build("bert")
    for model, kind in ((pooled, "cross"), (encoder, "bidirectional")):
        short, long = (
            profile(model, [{"input_ids": torch.tensor(t)}]) for t in ([[5]], [[5, 6, 7]])
        )
        assert short.heads()["kind"].eq("causal").all()  # one token can't tell
        for both in (short + long, long + short):
            assert both.heads()["kind"].eq(kind).all()
            assert both.heads()["distance"].isna().all() == (kind == "cross")


def test_where_dropout_acts_in_evaluation_nothing_is_said_of_the_error(tmp_path):
    dropped, plain = written(dropout=0.5), written()
    assert dropped.measured[0].reconstruction_error is None
    assert plain.measured[0].reconstruction_error < 1e-6
    assert_same_tables(dropped, plain)
    merged = dropped + dropped
    merged.save(tmp_path / "profile")
    assert Profile.load(tmp_path / "profile").measured[0].reconstruction_error is None


def test_a_second_softmax_in_the_module_doesnt_spoil_its_attention():
    both = written(extra=True)
    assert both.left_out == {" (a second softmax)": "its result was never multiplied with values"}
    assert_same_tables(both, written())
    assert_same_tables(both + both, written())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_no_map_is_kept_until_the_end_of_the_pass(implementation):
    model, batch = build("bert", implementation), padded(LONG)
    observer = Observer(read_batch(batch, seed=0, token_classes={}), Sampling())
    seen: list[weakref.ref] = []

    def observe(call: AttentionCall) -> None:
        observer(call)
        seen.append(weakref.ref(call.query if call.weights is None else call.weights))

    with torch.no_grad(), Capture(model, observe):
        model(**batch)
    assert len(seen) == 2
    assert [ref() for ref in seen] == [None, None]
    assert len(observer.finish({}, {}).pair_sums) == 3


# -- intervals ----------------------------------------------------------------------------------


def test_intervals_contain_the_value_and_narrow_with_more_texts():
    model = build("bert")
    lengths = np.random.default_rng(0).integers(10, 30, size=240).tolist()
    texts = some_texts(*lengths)
    few, many = (profile(model, [padded(texts[:n])]).intervals() for n in (24, 240))
    for table in (few, many):
        assert (table["low"] <= table["value"]).all()
        assert (table["value"] <= table["high"]).all()
    width = [
        (table["high"] - table["low"]).groupby(table["statistic"]).mean() for table in (few, many)
    ]
    steady = ["entropy", "distance", "confidence", "output_norm"]
    assert (width[1][steady] < width[0][steady]).all()
    pd.testing.assert_frame_equal(few, profile(model, [padded(texts[:24])]).intervals())


def test_figures_that_were_not_measured_have_no_interval():
    result = measured("t5", [batch_for("t5", SHORT)])
    table = result.intervals()
    assert "distance" not in set(table.query("kind == 'cross'")["statistic"])
    assert table["value"].notna().all()
    one = measured("bert", [padded(SHORT[:1])]).intervals()  # nothing to resample
    assert one["value"].notna().all()
    assert one[["low", "high"]].isna().all(axis=None)


def test_texts_of_one_token_have_no_choice_to_measure():
    heads = measured("bert", [padded([[5], [6]])]).heads()
    assert heads[["entropy", "distance"]].eq(0).all(axis=None)
    assert heads["current"].eq(1).all()
    empty = ["entropy_normalized", "distance_ratio", "previous", "next", "sink"]
    assert heads[[*empty, "nearest_similarity"]].isna().all(axis=None)


# -- the real model -----------------------------------------------------------------------------


def test_the_default_model_has_a_previous_token_head():
    source = load_model(None)
    texts = batch_texts(sample_texts()[:12], source)
    result = profile(source.model, texts.batches, token_classes=texts.token_classes)
    assert result.left_out == {}
    assert result.heads()["previous"].max() > 0.9
    assert all(layer.reconstruction_error < 1e-5 for layer in result.measured)
    assert all(layer.no_projection == "" for layer in result.measured)
    assert (
        result.heads()
        .drop(columns=["stack", "missing", "distance_unnormalized"])
        .notna()
        .all(axis=None)
    )


def test_the_padding_of_keys_is_not_that_of_other_queries():
    """Two sequences of one length: every query counts, whatever keys are padding."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    query, key = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    padding = torch.tensor([[False] * 4 + [True] * 2])
    inputs = {"query": query, "key": key, "value": key}
    padded = profile(attention, [{**inputs, "key_padding_mask": padding}]).heads()
    short = {"query": query, "key": key[:, :4], "value": key[:, :4]}
    alone = profile(attention, [short]).heads()
    for column in ("entropy", "first", "output_norm"):
        np.testing.assert_allclose(padded[column], alone[column], atol=2e-6)


def test_a_map_of_some_query_rows_is_left_out():
    """Which tokens the rows of a block are can't be told: no distance is made up for them."""
    model = MultiHeadAttention(16, 2)
    inputs = {"x": torch.randn(2, 9, 16), "is_causal": True}
    assert profile(model, [{**inputs, "block_size": 9}]).left_out == {}
    in_blocks = profile(model, [{**inputs, "block_size": 4}])
    assert in_blocks.measured == ()
    assert "its map has 4 of the 9 query rows (blocks, a cache" in in_blocks.left_out[""]


@pytest.mark.parametrize("form", ["bool", "added", "zeros_and_ones"])
def test_a_mask_of_queries_by_keys_that_hides_padding_is_refused(form):
    model, inputs = make("bert-sdpa")
    square = inputs["attention_mask"][:, None, None].expand(-1, 1, 9, -1).bool()
    masks = {
        "bool": square,
        "added": torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min),
        "zeros_and_ones": square.float(),
    }
    batch = {"input_ids": inputs["input_ids"], "attention_mask": masks[form]}
    with pytest.raises(ValueError, match="has 4 axes and hides keys from every query"):
        profile(model, [batch])


def test_a_mask_of_queries_by_keys_that_hides_nothing_from_all_is_the_models_affair():
    model, inputs = make("bert-sdpa")
    causal = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    result = profile(model, [{"input_ids": inputs["input_ids"], "attention_mask": causal}])
    assert result.heads()["kind"].unique().tolist() == ["causal"]


def test_a_model_that_counts_positions_by_itself_may_be_padded_on_the_left():
    """It numbers them from its padding id on, not from 0: it is let alone."""
    config = transformers.RobertaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=37, pad_token_id=0, max_position_embeddings=40,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.RobertaModel(config).eval()
    tokens = torch.randint(2, 60, (2, 9))
    mask = torch.ones_like(tokens)
    tokens[1, :4] = mask[1, :4] = 0
    left = profile(model, [{"input_ids": tokens, "attention_mask": mask}])
    alone = [{"input_ids": tokens[:1]}, {"input_ids": tokens[1:, 4:]}]
    expected = profile(model, alone)
    pd.testing.assert_frame_equal(left.heads(), expected.heads(), atol=2e-6)


def test_the_output_of_a_text_is_looked_for_among_the_outputs():
    """A contrastive model's first output is images by texts."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    layers = {"num_hidden_layers": 2, "projection_dim": 8}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 60, "eos_token_id": 1, **sizes, **layers},
        vision_config={"image_size": 8, "patch_size": 4, **sizes, **layers},
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    tokens = torch.randint(2, 60, (2, 9))
    tokens[:, -1] = 1
    batch = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8)}
    batch["attention_mask"] = torch.ones_like(tokens)
    batch["attention_mask"][1, :3] = 0
    left = profile(model, [batch])
    assert left.heads()["stack"].unique().tolist() == ["vision", "text"]


def test_right_padding_that_leaks_into_the_texts_is_refused():
    """Here through a convolution over positions; with one text at a time there is no padding."""

    class Convolved(Absolute):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x = super().forward(input_ids, attention_mask)
            return x + self.conv(x.mT).mT

    torch.manual_seed(0)
    model = Convolved()
    with pytest.raises(HeadprobeError, match="padding changes the model's output for a text"):
        profile(model, [padded(SHORT)])
    assert profile(model, [padded([text]) for text in SHORT]).texts == len(SHORT)


def test_several_inputs_in_one_sequence_are_left_out_of_a_padded_batch():
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn = nn.Embedding(20, 8), MultiHeadAttention(8, 2)

        def forward(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            both = torch.cat([x, self.embed(input_ids)], dim=1)
            mask = F.pad(attention_mask, (x.shape[1], 0), value=1)
            return self.attn(both, mask=mask[:, None, None].bool())

    torch.manual_seed(0)
    batch = {"x": torch.randn(len(SHORT), 3, 8), **padded(SHORT)}
    result = profile(Joined(), [batch])
    assert "from which input" in result.left_out["attn"]
    whole = {name: value[:1] for name, value in batch.items()}
    whole["attention_mask"] = torch.ones_like(whole["attention_mask"])
    assert profile(Joined(), [whole]).left_out == {}
