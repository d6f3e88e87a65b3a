"""What holds for every statistic: it merges, and nothing but the text decides its value."""

import typing

import pytest
import torch

from headprobe.statistics import BLOCKS, LAYER_STATISTICS, STATISTICS, PairSums, Rows, Statistic

EVERY = (*STATISTICS, *LAYER_STATISTICS)
KINDS = ("bidirectional", "causal", "cross", "sink", "grid")

every_statistic = pytest.mark.parametrize("statistic", EVERY, ids=lambda s: s.name)
every_kind = pytest.mark.parametrize("kind", KINDS)


class Made:
    """Random maps of three texts of 20, 17 and 9 tokens; padding on the right or on the left."""

    def __init__(self, kind, *, pad=0, left=False, heads=4):
        lengths = (20, 17, 9)
        generator = torch.Generator().manual_seed(7)
        width = max(lengths) + pad
        self.kind, self.lengths = kind, lengths
        self.weights = torch.zeros(3, heads, width, width)
        self.valid = torch.zeros(3, width, dtype=torch.bool)
        self.special = torch.zeros(3, width, dtype=torch.bool)
        self.punctuation = torch.zeros(3, width, dtype=torch.bool)
        self.z = torch.zeros(3, heads, width, 5)
        self.coordinates = torch.full((3, width, 2), torch.nan)
        for text, size in enumerate(lengths):
            some = slice(width - size, width) if left else slice(0, size)
            scores = 3 * torch.randn(heads, size, size, generator=generator)
            if kind == "causal":
                later = torch.ones(size, size, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            sink = torch.full((heads, size, 1), 1.0 if kind == "sink" else -torch.inf)
            both = torch.cat([scores, sink], dim=-1).softmax(-1)
            self.weights[text, :, some, some] = both[..., :-1]
            index = torch.arange(1, size)  # the first position lies nowhere
            self.coordinates[text, some][1:] = torch.stack([index // 4 * 16.0, index % 4 * 16.0], 1)
            self.valid[text, some] = True
            self.special[text, some.start] = self.special[text, some.start + size - 1] = True
            self.punctuation[text, some.start + 3] = True
            self.z[text, :, some] = torch.randn(heads, size, 5, generator=generator)
        root = torch.randn(heads, 5, 12, generator=generator)
        self.gram = root @ root.transpose(1, 2)
        # Rows of padding hold anything.
        self.weights[~self.valid[:, None].expand(3, heads, width)] = torch.nan

    def rows(self, start=0, stop=None, *, texts=slice(None), heads=slice(None)):
        some = slice(start, stop)
        positions = torch.arange(self.weights.shape[2])[some]
        visible = torch.ones(1, 1, len(positions), self.weights.shape[3], dtype=torch.bool)
        if self.kind == "causal":
            visible = (torch.arange(self.weights.shape[3]) <= positions[:, None])[None, None]
        return Rows(
            weights=self.weights[texts][:, heads, some],
            positions=positions,
            query_valid=self.valid[texts, some],
            key_valid=self.valid[texts],
            visible=visible,
            self_attention=self.kind != "cross",
            coordinates=self.coordinates[texts] if self.kind == "grid" else None,
            sink=self.kind == "sink",
            classes={"special": self.special[texts], "punctuation": self.punctuation[texts]},
            z=self.z[texts][:, heads, some],
            projection_gram=self.gram[heads],
        )

    def sums(self, statistic, *, texts=(0, 1, 2), heads=slice(None), size=None):
        """The sums by resampling block; text t lies in block t."""
        texts = list(texts)
        width = self.weights.shape[2]
        parts = [
            statistic.of(self.rows(start, start + (size or width), texts=texts, heads=heads))
            for start in range(0, width, size or width)
        ]
        if parts[0] is None:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.in_blocks(torch.tensor(texts), torch.tensor(self.lengths)[texts])


def assert_same(a, b, tolerance):
    torch.testing.assert_close(a.value(), b.value(), atol=tolerance, rtol=0, equal_nan=True)
    torch.testing.assert_close(a.total, b.total, atol=20 * tolerance, rtol=tolerance)
    torch.testing.assert_close(a.count, b.count, atol=20 * tolerance, rtol=tolerance)


WHERE = {
    **dict.fromkeys(("distance", "distance_ratio", "current"), set(KINDS) - {"cross"}),
    **dict.fromkeys(("previous", "next"), set(KINDS) - {"cross", "grid"}),
    "distance_unnormalized": {"grid"},
    "missing": {"sink"},
}
"""For which kinds of attention a statistic exists; for all if it isn't here."""


def cases():
    return [
        pytest.param(statistic, kind, id=f"{statistic.name}-{kind}")
        for statistic in EVERY
        for kind in KINDS
        if kind in WHERE.get(statistic.name, KINDS)
    ]


every_case = pytest.mark.parametrize(("statistic", "kind"), cases())


@every_case
def test_merging_does_not_depend_on_grouping_and_order(statistic, kind):
    made = Made(kind)
    a, b, c = (made.sums(statistic, texts=[text]) for text in range(3))
    whole = made.sums(statistic)
    for merged in ((a + b) + c, a + (b + c), c + (b + a), (c + a) + b):
        torch.testing.assert_close(merged.total, whole.total, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(merged.count, whole.count, atol=1e-12, rtol=1e-12)


@every_case
def test_a_shard_without_texts_adds_nothing(statistic, kind):
    made = Made(kind)
    nothing = torch.tensor([], dtype=torch.long)
    empty = statistic.of(made.rows(texts=[])).in_blocks(nothing, nothing)
    whole = made.sums(statistic)
    assert torch.equal((whole + empty).total, whole.total)
    assert torch.equal((whole + empty).count, whole.count)


@every_case
def test_texts_of_a_block_are_added_up(statistic, kind):
    made = Made(kind)
    sums, tokens = statistic.of(made.rows()), torch.tensor(made.lengths)
    apart = sums.in_blocks(torch.tensor([0, 1, 2]), tokens)
    together = sums.in_blocks(torch.tensor([5, 5, BLOCKS - 1]), tokens)
    assert together.total.shape == (BLOCKS, apart.total.shape[1])
    torch.testing.assert_close(together.total[5], apart.total[:2].sum(dim=0))
    torch.testing.assert_close(together.total[-1], apart.total[2])
    torch.testing.assert_close(together.value(), apart.value(), atol=1e-12, rtol=0)


@every_case
@pytest.mark.parametrize("size", [1, 3, 7, 32])
def test_blocks_of_rows_of_any_size(statistic, kind, size):
    made = Made(kind)
    assert_same(made.sums(statistic, size=size), made.sums(statistic), 1e-6)


@every_case
def test_the_order_and_size_of_batches(statistic, kind):
    made = Made(kind)
    whole = made.sums(statistic)
    assert_same(made.sums(statistic, texts=[2, 0, 1]), whole, 1e-6)
    assert_same(made.sums(statistic, texts=[0, 1]) + made.sums(statistic, texts=[2]), whole, 1e-6)


@every_case
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(statistic, kind, left):
    alone = Made(kind).sums(statistic)
    assert_same(Made(kind, pad=40, left=left).sums(statistic), alone, 2e-6)
    assert alone.value().isfinite().all()


@every_case
def test_permuting_heads_permutes_the_value(statistic, kind):
    order = [2, 0, 3, 1]
    made = Made(kind)
    permuted, plain = made.sums(statistic, heads=order).value(), made.sums(statistic).value()
    expected = plain if statistic in LAYER_STATISTICS else plain[order]
    torch.testing.assert_close(permuted, expected, atol=1e-6, rtol=0)


@every_case
def test_values_are_in_range(statistic, kind):
    found = Made(kind).sums(statistic).value()
    assert found.isfinite().all()
    assert statistic.low is None or (found >= statistic.low).all()
    assert statistic.high is None or (found <= statistic.high + 1e-6).all()
    assert found.shape == ((1,) if statistic in LAYER_STATISTICS else (4,))


@every_case
def test_weights_of_a_bfloat16_model(statistic, kind):
    """Rows that add up to 0.998 to 1.002."""
    made, exact = Made(kind), Made(kind).sums(statistic).value()
    made.weights = made.weights.bfloat16().float()
    found = made.sums(statistic).value()
    torch.testing.assert_close(found, exact, atol=5e-3, rtol=5e-3)
    assert statistic.low is None or (found >= statistic.low).all()


@every_case
def test_a_row_that_may_see_nothing(statistic, kind):
    made = Made(kind)
    made.weights[0, :, 4] = 0
    assert made.sums(statistic).value().isfinite().all()


@every_case
def test_no_row_no_figure(statistic, kind):
    made = Made(kind)
    made.valid[:] = False
    assert made.sums(statistic).value().isnan().all()


@every_statistic
@every_kind
def test_where_a_statistic_exists(statistic, kind):
    exists = Made(kind).sums(statistic) is not None
    assert exists == (kind in WHERE.get(statistic.name, KINDS))


@every_statistic
def test_it_describes_itself(statistic):
    for text in ("name", "title", "unit", "definition", "source"):
        assert isinstance(getattr(statistic, text), str)
        assert getattr(statistic, text)
    assert statistic.__doc__
    assert getattr(statistic, "__final__", False)
    assert issubclass(statistic, Statistic)


def test_each_statistic_is_in_one_list():
    assert len({statistic.name for statistic in EVERY}) == len(EVERY)
    assert set(Statistic.__subclasses__()) == set(EVERY)
    assert typing.get_type_hints(Statistic)["total"] is torch.Tensor


class TestPairSums:
    def weights(self, heads=4, rows=24, keys=70, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return (3 * torch.randn(heads, rows, keys, generator=generator)).softmax(-1)

    def test_merging(self):
        parts = [PairSums.of([(self.weights(seed=s), self.weights(seed=9))], [s]) for s in range(3)]
        a, b, c = parts
        for merged in ((c + a) + b, a + (b + c)):
            torch.testing.assert_close(merged.total, (a + b + c).total, atol=1e-12, rtol=1e-12)
            assert torch.equal(merged.count, (a + b + c).count)
        assert a.total.shape == (BLOCKS, 3, 4, 4)

    def test_rows_one_by_one(self):
        a, b = self.weights(), self.weights(seed=1)
        whole = PairSums.of([(a, b)], [0]).value()
        parts = [PairSums.of([(a[:, i : i + 1], b[:, i : i + 1])], [0]) for i in range(a.shape[1])]
        total = sum(parts[1:], start=parts[0])
        torch.testing.assert_close(total.value(), whole, atol=1e-6, rtol=0)

    def test_within_a_layer_it_is_symmetric_with_ones_on_the_diagonal(self):
        found = PairSums.of([(self.weights(), self.weights())], [0]).value()
        torch.testing.assert_close(found, found.transpose(1, 2), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            found.diagonal(dim1=1, dim2=2), torch.ones(3, 4).double(), atol=1e-6, rtol=0
        )

    def test_permuting_heads_permutes_the_matrix(self):
        order = [2, 0, 3, 1]
        weights = self.weights()
        permuted = PairSums.of([(weights[order], weights[order])], [0]).value()
        expected = PairSums.of([(weights, weights)], [0]).value()[:, order][:, :, order]
        torch.testing.assert_close(permuted, expected, atol=1e-6, rtol=0)

    def test_no_row_no_figure(self):
        empty = self.weights()[:, :0]
        assert PairSums.of([(empty, empty)], [0]).value().isnan().all()
