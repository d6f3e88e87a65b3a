"""Public reports of what happens to attentions, and to their observers, in training."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headprobe import Capture, HeadprobeError, from_attentions, profile
from tests.cases import seen
from tests.models import Nano, by_hand, flash, make
from tests.test_capture import whole


def mean_entropy(call):
    weights = whole(call)
    return -torch.special.xlogy(weights, weights).sum(dim=-1).mean()


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "t5-eager", "t5-sdpa"])
def test_rows_in_training_do_not_sum_to_one(name):
    """In training, attentions had rows that did not sum to 1 and weights above 1.

    https://github.com/huggingface/transformers/issues/31468
    https://github.com/huggingface/transformers/issues/1146
    https://github.com/pytorch/pytorch/issues/42929
    https://github.com/pytorch/pytorch/issues/33360
    https://github.com/pytorch/pytorch/issues/90842
    https://github.com/idiap/fast-transformers/issues/131
    https://github.com/facebookresearch/fairseq/issues/351
    """
    model, inputs = make(name)
    model.train()
    for call in seen(model, inputs):
        torch.testing.assert_close(
            whole(call).sum(dim=-1), torch.ones(call.batch, call.heads, call.queries)
        )
    if "eager" in name:
        with torch.no_grad():
            out = model(**inputs, output_attentions=True)
        given = out.get("attentions") or out["encoder_attentions"]
        with pytest.raises(HeadprobeError, match="so dropout acted on it"):
            from_attentions(given, attention_mask=inputs["attention_mask"])


class Checkpointed(nn.Module):
    """Layers that forget what they computed, and compute it again on the way back."""

    def __init__(self, layers, **options):
        super().__init__()
        self.layers, self.options = layers, options

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options) if self.options else layer(x)
        return x


class Layer(Nano):
    def forward(self, x):
        q, k, v = (
            side.unflatten(-1, (4, 8)).transpose(1, 2) for side in self.c_attn(x).chunk(3, dim=-1)
        )
        return x + self.c_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


LAYERS = {
    "softmax": lambda: Layer(attend=by_hand),
    "sdpa": lambda: Layer(attend=flash),
    "torch": lambda: nn.TransformerEncoderLayer(32, 4, 37, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradient_checkpointing_counts_no_call_twice_and_does_not_fail(kind, reentrant):
    """With hooks, gradient checkpointing failed; or they ran once more on the way back.

    https://github.com/stanfordnlp/pyvene/pull/242
    """
    layers = nn.ModuleList(LAYERS[kind]() for _ in range(3))
    x = torch.randn(2, 9, 32, requires_grad=True)
    Checkpointed(layers)(x).pow(2).sum().backward()
    expected, x.grad = x.grad, None
    sites = []

    def observe(call):
        sites.append(call.site)
        mean_entropy(call)  # what this saves for its gradient is none of checkpointing's business

    model = Checkpointed(layers, use_reentrant=reentrant)
    with Capture(model, observe):
        loss = model(x).pow(2).sum()
        loss.backward()
    assert len(sites) == len(set(sites)) == 3
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_checkpointing_of_a_transformers_model_is_left_alone():
    """The same of a language model's own switch for it.

    https://github.com/stanfordnlp/pyvene/pull/242
    """
    for attention in ("eager", "sdpa"):
        model, inputs = make(f"llama-{attention}")
        model.train()
        model(**inputs).logits.pow(2).sum().backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with Capture(model) as capture:
            loss = model(**inputs).logits.pow(2).sum()
        loss.backward()
        assert capture.calls == 2
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
def test_an_observer_registered_after_compiling_is_called():
    """Hooks that were put on a model after torch.compile never ran.

    https://github.com/pytorch/pytorch/issues/117758
    https://github.com/pytorch/pytorch/issues/96722
    https://github.com/pytorch/pytorch/issues/173452
    """
    model, inputs = make("nano")
    (expected,) = seen(model, inputs)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(**inputs)
        for watched in (compiled, model):
            calls = []
            with Capture(watched, calls.append):
                output = compiled(**inputs)
            assert [whole(call).equal(whole(expected)) for call in calls] == [True]
            torch.testing.assert_close(output, before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_entropy_can_be_logged_while_a_model_trains(attention):
    """People want the entropy of each head in their logs while the model trains.

    https://github.com/eole-nlp/eole/pull/250
    https://github.com/ufal/neuralmonkey/issues/498
    """
    losses, logged = [], []
    for watched in (False, True):
        model, inputs = make(f"gpt2-{attention}")
        model.train()
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            with torch.enable_grad():
                if watched:
                    with Capture(model, lambda call: logged.append(mean_entropy(call).item())):
                        loss = model(**inputs, labels=inputs["input_ids"]).loss
                else:
                    loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert len(logged) == 3 * 2
    assert all(0 < entropy < 9 for entropy in logged)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_loss_that_drives_heads_apart(checkpointed):
    """A training run adds a loss for the diversity of its heads, and needs their similarity.

    https://github.com/iCog-Labs-Dev/PC-Transformers/pull/42
    https://github.com/iCog-Labs-Dev/PC-Transformers/pull/40
    """
    layers, x = nn.ModuleList([LAYERS["sdpa"]() for _ in range(2)]), torch.randn(2, 9, 32)
    options = {"use_reentrant": False} if checkpointed else {}
    model = Checkpointed(layers, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def similarity(call):
        heads = nn.functional.normalize(whole(call).flatten(2), dim=-1)
        return (heads @ heads.mT).mean()

    def step():
        found = []
        with Capture(model, lambda call: found.append(similarity(call))):
            model(x)
        return sum(found)

    before = profile(model, [{"x": x}]).pairs()["js_similarity"].mean()
    for _ in range(10):
        step().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = profile(model, [{"x": x}]).pairs()["js_similarity"].mean()
    assert after < before - 0.01
