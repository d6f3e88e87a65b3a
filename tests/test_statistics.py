"""Known answers: numbers that can be checked by hand, and properties that hold for any map."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from headprobe.attention import weighted_values
from headprobe.statistics import (
    PairSums,
    Rows,
    entropy,
    js_divergence,
    pair_similarities,
    total_variation,
)
from headprobe.statistics.output import OutputNorm
from headprobe.statistics.places import (
    Current,
    Distance,
    DistanceRatio,
    First,
    Next,
    Previous,
    Punctuation,
    Sink,
    Special,
)
from headprobe.statistics.spread import (
    Confidence,
    EffectiveSupport,
    Entropy,
    EntropyNormalized,
    GeneralizedJS,
)


def rows_of(weights, **given):
    """Rows of unpadded texts; a map [queries, keys] is one text's one head."""
    weights = weights.reshape((1,) * (4 - weights.dim()) + weights.shape)
    batch, _, queries, keys = weights.shape
    defaults = {
        "positions": torch.arange(queries),
        "query_valid": torch.ones(batch, queries, dtype=torch.bool),
        "key_valid": torch.ones(batch, keys, dtype=torch.bool),
        "visible": torch.ones(1, 1, queries, keys, dtype=torch.bool),
    }
    return Rows(weights, **defaults | given)


def value(statistic, weights, **given):
    return statistic.of(rows_of(weights, **given)).value().tolist()


def uniform(size):
    return torch.full((size, size), 1 / size)


def causal(size):
    below = torch.ones(size, size).tril()
    return below / below.sum(dim=-1, keepdim=True), {"visible": below.bool()[None, None]}


def only(size, offset):
    """All mass at a fixed offset; where there is no such key, on the token itself."""
    weights = torch.eye(size).roll(offset, dims=1)
    outside = range(-offset) if offset < 0 else range(size - offset, size)
    for row in outside:
        weights[row] = torch.eye(size)[row]
    return weights


class TestEntropy:
    def test_uniform(self):
        assert value(Entropy, uniform(50)) == [pytest.approx(math.log(50), abs=1e-6)]
        assert value(EntropyNormalized, uniform(50)) == [pytest.approx(1, abs=1e-6)]
        assert value(EffectiveSupport, uniform(50)) == [pytest.approx(50, rel=1e-5)]
        assert value(Confidence, uniform(50)) == [pytest.approx(0.02)]

    def test_one_hot_is_exactly_0(self):
        found = entropy(torch.eye(5))
        assert torch.equal(found, torch.zeros(5))
        assert not torch.signbit(found).any()
        assert value(Entropy, torch.eye(5)) == [0.0]

    def test_it_has_a_gradient(self):
        weights = torch.randn(3, 7, dtype=torch.double).softmax(-1).requires_grad_()
        assert torch.autograd.gradcheck(entropy, weights)

    def test_the_effective_support_of_a_one_hot(self):
        assert value(EffectiveSupport, torch.eye(5)) == [1.0]

    def test_half_quarter_quarter_in_nats(self):
        assert entropy(torch.tensor([0.5, 0.25, 0.25])).item() == pytest.approx(1.0397208)

    def test_causal_uniform(self):
        weights, mask = causal(64)
        assert value(Entropy, weights, **mask)[0] / math.log(64) == pytest.approx(0.7708206873)
        assert value(EntropyNormalized, weights, **mask) == [pytest.approx(1, abs=1e-6)]

    def test_a_row_that_sees_one_key_counts_in_the_raw_figure_only(self):
        weights, mask = causal(2)
        assert value(Entropy, weights, **mask) == [pytest.approx(math.log(2) / 2)]
        assert value(EntropyNormalized, weights, **mask) == [pytest.approx(1)]
        alone = causal(1)
        assert value(Entropy, alone[0], **alone[1]) == [0.0]
        assert math.isnan(value(EntropyNormalized, alone[0], **alone[1])[0])


class TestPlaces:
    def test_distance_of_uniform_heads(self):
        assert value(Distance, uniform(128)) == [pytest.approx(42.6640625)]
        weights, mask = causal(64)
        assert value(Distance, weights, **mask) == [pytest.approx(15.75)]
        assert value(DistanceRatio, uniform(128)) == [pytest.approx(1)]
        assert value(DistanceRatio, weights, **mask) == [pytest.approx(1)]

    def test_distance_of_a_previous_token_head_and_of_a_self_head(self):
        rows = rows_of(only(9, -1))
        assert rows.distance[0, 0].tolist() == [0, *[1] * 8]
        assert value(Distance, torch.eye(9)) == [0.0]
        assert value(DistanceRatio, torch.eye(9)) == [0.0]

    def test_a_row_that_sees_one_key_far_away_has_a_distance_but_no_ratio(self):
        weights = torch.tensor([[0, 0, 0, 1.0], [0, 1, 0, 0]])
        seen = torch.tensor([[False, False, False, True], [True, True, True, True]])[None, None]
        assert value(Distance, weights, visible=seen) == [1.5]
        assert value(DistanceRatio, weights, visible=seen) == [0.0]

    @pytest.mark.parametrize(("statistic", "offset"), [(Previous, -1), (Current, 0), (Next, 1)])
    def test_a_perfect_head_has_mass_1_over_the_rows_that_have_such_a_key(self, statistic, offset):
        assert value(statistic, only(9, offset)) == [1.0]

    def test_next_is_the_key_after_the_query(self):
        weights = torch.zeros(3, 3)
        weights[0, 1] = weights[1, 2] = weights[2, 0] = 1
        assert value(Next, weights) == [1.0]
        assert value(Previous, weights) == [0.0]

    def test_next_of_a_causal_head_is_0(self):
        weights, mask = causal(8)
        assert value(Next, weights, **mask) == [0.0]

    def test_next_of_the_last_token_before_padding_does_not_count(self):
        weights = only(6, 1)
        weights[3] = 0.25  # the last of four tokens
        some = {"query_valid": torch.arange(6)[None] < 4, "key_valid": torch.arange(6)[None] < 4}
        assert value(Next, weights, **some) == [1.0]

    def test_first(self):
        weights = torch.zeros(64, 64)
        weights[:, 0] = 1
        assert value(First, weights) == [1.0]
        assert value(Sink, weights) == [1.0]

    @pytest.mark.parametrize(
        ("size", "mass"), [(64, 0.0741232954), (32, 0.1268280), (16, 0.2112956)]
    )
    def test_first_of_a_causal_uniform_head(self, size, mass):
        weights, mask = causal(size)
        assert value(First, weights, **mask) == [pytest.approx(mass, abs=1e-6)]
        assert sink(weights[None, None], [size], **mask) == [0.0]

    def test_first_is_the_first_token_after_left_padding(self):
        weights = torch.zeros(6, 6)
        weights[:, 2] = 1
        assert value(First, weights, key_valid=torch.arange(6)[None] >= 2) == [1.0]

    def test_what_a_row_may_see_can_differ_by_head(self):
        """A head with a window of one key beside a head that sees all."""
        weights = torch.stack([torch.eye(4), uniform(4)])[None]
        seen = torch.stack([torch.eye(4), torch.ones(4, 4)])[None].bool()
        for statistic in (EntropyNormalized, DistanceRatio):
            window, full = value(statistic, weights, visible=seen)
            assert math.isnan(window)
            assert full == pytest.approx(1)

    def test_mass_on_token_classes(self):
        weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0]])
        classes = {
            "special": torch.tensor([[True, False, False, True]]),
            "punctuation": torch.tensor([[False, True, False, False]]),
        }
        assert value(Special, weights, classes=classes) == [pytest.approx((0.5 + 0.25) / 2)]
        assert value(Punctuation, weights, classes=classes) == [pytest.approx(0.225)]

    @pytest.mark.parametrize("statistic", [Distance, DistanceRatio, Previous, Current, Next])
    def test_between_two_sequences_there_is_no_distance(self, statistic):
        assert statistic.of(rows_of(torch.ones(3, 5) / 5, self_attention=False)) is None

    @pytest.mark.parametrize("statistic", [Special, Punctuation])
    def test_without_tokens_there_is_no_mass_on_a_class(self, statistic):
        assert statistic.of(rows_of(uniform(4))) is None


def sink(weights, tokens, **given):
    blocks = torch.arange(len(tokens))
    sums = Sink.of(rows_of(weights, **given)).in_blocks(blocks, torch.tensor(tokens))
    return sums.value().tolist()


class TestSink:
    def test_it_is_decided_per_text(self):
        """Masses of 0.0 and 0.7: half of the texts, though their mean is above the threshold."""
        weights = torch.zeros(2, 1, 20, 20)
        weights[0, :, :, 5] = 1
        weights[1, :, :, 0], weights[1, :, :, 1] = 0.7, 0.3
        assert sink(weights, [20, 20]) == [0.5]

    def test_short_texts_have_no_vote(self):
        weights = torch.zeros(2, 1, 20, 20)
        weights[..., 0] = 1
        assert sink(weights, [20, 15]) == [1.0]
        assert math.isnan(sink(weights, [15, 15])[0])

    def test_after_left_padding_the_first_token_is_the_sink(self):
        weights = torch.zeros(1, 1, 20, 20)
        weights[..., 3] = 1
        some = torch.arange(20)[None] >= 3
        assert sink(weights, [17], query_valid=some, key_valid=some) == [1.0]

    def test_the_threshold_itself_is_no_sink(self):
        weights = torch.zeros(1, 2, 20, 20, dtype=torch.double)
        weights[:, 0, :, 0], weights[:, 1, :, 0] = 0.25, 0.35
        assert sink(weights, [20]) == [0.0, 1.0]


class TestOutputNorm:
    def test_it_is_the_norm_after_the_output_projection(self):
        weights = torch.rand(2, 4, 6, 6).softmax(-1)
        values, projection = torch.randn(2, 2, 6, 8), torch.randn(4, 8, 20)
        z = weighted_values(weights, values)
        gram = projection @ projection.transpose(1, 2)
        expected = torch.einsum("bhqd,hdm->bhqm", z, projection).norm(dim=-1).mean(dim=(0, 2))
        assert value(OutputNorm, weights, z=z, projection_gram=gram) == pytest.approx(
            expected.tolist(), rel=1e-5
        )

    def test_a_dead_head_has_exactly_0(self):
        weights = torch.rand(1, 2, 6, 6).softmax(-1)
        gram = torch.zeros(2, 8, 8)
        assert value(OutputNorm, weights, z=torch.randn(1, 2, 6, 8), projection_gram=gram) == [0, 0]

    def test_without_a_projection_there_is_none(self):
        assert OutputNorm.of(rows_of(uniform(4))) is None


class TestGeneralizedJS:
    def test_heads_that_agree(self):
        weights = torch.rand(1, 1, 6, 6).softmax(-1).expand(1, 4, 6, 6)
        assert value(GeneralizedJS, weights) == [pytest.approx(0, abs=1e-6)]

    def test_heads_with_nothing_in_common(self):
        weights = torch.zeros(1, 4, 6, 6)
        for head in range(4):
            weights[0, head, :, head] = 1
        assert value(GeneralizedJS, weights) == [pytest.approx(math.log(4))]


class TestSimilarity:
    def test_one_hots_have_nothing_in_common(self):
        a, b = torch.eye(2)
        assert js_divergence(a, b).item() == pytest.approx(math.log(2))
        assert total_variation(a, b).item() == 1
        found = pair_similarities(a.view(1, 1, 2), b.view(1, 1, 2)).flatten().tolist()
        assert found == pytest.approx([0, 0, 0], abs=1e-6)

    def test_a_hand_answer(self):
        a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
        assert js_divergence(a, b).item() == pytest.approx(0.2157615543)
        assert total_variation(a, b).item() == 0.5
        found = pair_similarities(a.view(1, 1, 2), b.view(1, 1, 2)).flatten().tolist()
        assert found == pytest.approx([1 - 0.2157615543 / math.log(2), 0.5, 0.5**0.5])

    def test_a_duplicated_head(self):
        weights = torch.rand(7, 3, 11).softmax(-1)
        twice = torch.cat([weights, weights[:, :1]], dim=1)
        js, overlap, cosine = pair_similarities(twice, twice)[:, :, 0, 3]
        assert torch.equal(js, torch.ones(7))
        assert torch.equal(overlap, torch.ones(7))
        torch.testing.assert_close(cosine, torch.ones(7))

    def test_a_row_that_attends_to_nothing_is_no_nan(self):
        weights = torch.stack([torch.zeros(4), torch.full((4,), 0.25)])[None]
        assert pair_similarities(weights, weights).isfinite().all()

    def test_rounding_leaves_no_similarity_out_of_range(self):
        """In float32 sharp rows would give -1e-7, and rows that are alike a cosine above 1."""
        for sharpness in (0.3, 30.0):
            weights = (sharpness * torch.randn(200, 5, 40)).softmax(-1)
            found = pair_similarities(weights, weights)
            assert found.min() >= 0
            assert found.max() <= 1

    def test_pair_sums_are_means_over_rows(self):
        a, b = torch.rand(3, 40, 90).softmax(-1), torch.rand(2, 40, 90).softmax(-1)
        sums = PairSums.of([(a, b)], [5])
        expected = pair_similarities(a.transpose(0, 1), b.transpose(0, 1)).mean(dim=1)
        torch.testing.assert_close(sums.value(), expected.double(), atol=1e-6, rtol=0)
        assert sums.count.nonzero().tolist() == [[5]]


@st.composite
def distributions(draw, count=2):
    size = draw(st.integers(2, 40))
    sharpness = draw(st.sampled_from([0.0, 0.3, 3.0, 30.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(count, size, generator=generator, dtype=torch.double) * sharpness
    return (logits.softmax(-1) * (logits > logits.amin(dim=-1, keepdim=True) - 1)).unbind()


class TestProperties:
    @given(distributions(3))
    @settings(deadline=None)
    def test_jensen_shannon(self, given):
        p, q, r = given
        js = js_divergence(p, q)
        middle = ((p + q) / 2).numpy()
        divergences = [rel_entr(side.numpy(), middle).sum() for side in (p, q)]
        assert js == pytest.approx(sum(divergences) / 2, abs=1e-9)
        assert js == js_divergence(q, p)
        assert js_divergence(p, p) == 0
        assert 0 <= js <= math.log(2) + 1e-12
        root = [js_divergence(*pair).sqrt() for pair in ((p, r), (p, q), (q, r))]
        assert root[0] <= root[1] + root[2] + 1e-9
        assert total_variation(p, q) ** 2 / 2 <= js + 1e-12

    @given(distributions())
    @settings(deadline=None)
    def test_the_other_measures(self, given):
        p, q = given
        js, overlap, cosine = pair_similarities(p.view(1, 1, -1), q.view(1, 1, -1)).flatten()
        assert js == pytest.approx(1 - float(js_divergence(p, q)) / math.log(2))
        assert overlap == pytest.approx(1 - np.abs((p - q).numpy()).sum() / 2)
        assert 0 <= overlap <= 1 + 1e-12
        assert cosine == pytest.approx(float(p @ q / (p.norm() * q.norm())))

    @given(distributions())
    @settings(deadline=None)
    def test_entropy(self, given):
        p, q = given
        assert 0 <= entropy(p) <= math.log(len(p)) + 1e-12
        assert entropy(p[torch.randperm(len(p))]) == pytest.approx(float(entropy(p)), abs=1e-12)
        assert entropy((p + q) / 2) >= (entropy(p) + entropy(q)) / 2 - 1e-12

    def test_similarity_of_mean_maps_is_no_smaller(self):
        p, q = torch.rand(2, 8, 16).mul(5).softmax(-1)
        assert js_divergence(p.mean(0), q.mean(0)) <= js_divergence(p, q).mean() + 1e-7
