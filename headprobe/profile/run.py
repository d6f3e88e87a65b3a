"""Run a model on texts and measure its heads while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headprobe.capture import Capture, distinct, seen_kernels
from headprobe.profile.fingerprint import fingerprint
from headprobe.profile.observer import Observer
from headprobe.profile.padding import Padding
from headprobe.profile.sums import Profile
from headprobe.profile.texts import TOKEN_CLASSES, read_batch


@dataclass(frozen=True)
class Sampling:
    """On which query rows, and of which layers, heads are compared.

    Attributes:
        rows: sampled rows of a text (all of a text of 64 tokens or fewer); None for all rows.
        rows_across: of these, how many are used to compare heads of different layers; None for all.
        pairs: at most this many pairs of heads; beyond it, a seeded choice of pairs of layers.
        seed: of the draws. The rows of a text follow from it and the text's tokens alone.
    """

    rows: int | None = 16
    rows_across: int | None = None
    pairs: int = 50_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "rows_across"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise ValueError(f"{name} is {number}: expected 1 or more, or None for all rows")
        for name in ("pairs", "seed"):
            number = getattr(self, name)
            if not (isinstance(number, int) and number >= 0):
                raise ValueError(f"{name} is {number}: expected a whole number, 0 or more")


def profile(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    sampling: Sampling | None = None,
    token_classes: Mapping[str, Iterable[int]] | None = None,
    batch_first: bool = True,
    seconds: Mapping[str, float] | None = None,
) -> Profile:
    """Measure every attention head of a model on some texts, in one forward pass each.

    The model runs in eval mode and without gradients; its training flags are restored. Attention
    in a closed kernel (flash, flex) runs as sdpa instead; `switched` then says so.

    Args:
        model: any module that attends with a softmax.
        batches: keywords of `model.forward`. `attention_mask` tells padding of
            `input_ids`, `decoder_attention_mask` that of `decoder_input_ids`; right or left.
        sampling: on which rows heads are compared.
        token_classes: token class (one of TOKEN_CLASSES) -> token ids, for the mass on them.
        batch_first: whether a batch's tensors are [batch, positions, ...], or, as torch's own
            layers like it, [positions, batch, ...]; masks are always [batch, positions].
        seconds: name of an input that is sound -> seconds per step along its time axis (one over
            the sampling rate of `input_values`, 0.01 for the frames of most spectrograms);
            distances are then in seconds, else in frames.

    Returns:
        The sums. `.heads()`, `.pairs()` and `.layers()` are the tables; `+` adds other texts.
        Of no batches the empty profile, which changes no sum.

    Raises:
        NoAttentionError: if the model ran and no attention was seen.
        HeadprobeError: if padding can't be kept out of the numbers.
        TypeError: if the model is no module, or a batch is not a mapping of keywords.
        ValueError: if nothing in a batch has a batch axis and positions, or a class is unknown.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
        >>> result = profile(layer, [{"src": torch.randn(2, 5, 8)}])
        >>> len(result.heads())
        2
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a torch.nn.Module, which names its parts"
        )
    sampling = sampling or Sampling()
    classes = checked_classes(token_classes)
    settings = {"model": fingerprint(model), **sampling.__dict__, "classes": sorted(classes)}
    if seconds:
        settings["seconds"] = dict(seconds)
    total = Profile()
    padding = Padding(model)
    with evaluating(model), seen_kernels(model) as switched:
        for batch in batches:
            _check_batch(batch)
            texts = read_batch(
                distinct(batch),
                seed=sampling.seed,
                token_classes=classes,
                batch_first=batch_first,
            )
            texts = replace(texts, seconds=dict(seconds or {}))
            inputs = padding.inputs(texts.inputs)
            observer = Observer(texts, sampling)
            with Capture(model, observer) as capture:
                output = model(**inputs)
            if batch_first:
                padding.check(inputs, output)
            total += observer.finish(capture.unread, settings)
    return replace(total, switched=dict(switched))


def checked_classes(
    token_classes: Mapping[str, Iterable[int]] | None,
) -> dict[str, frozenset[int]]:
    """Token class -> token ids.

    Raises:
        ValueError: if there is no statistic for a class.
        TypeError: if a class has anything but token ids.
    """
    classes = {name: frozenset(ids) for name, ids in (token_classes or {}).items()}
    unknown = sorted(classes.keys() - set(TOKEN_CLASSES))
    if unknown:
        raise ValueError(f"token class {unknown[0]!r}: expected {' or '.join(TOKEN_CLASSES)}")
    for name, ids in classes.items():
        for token in ids:
            if not isinstance(token, int):
                raise TypeError(f"token class {name!r} has {token!r}: expected token ids (int)")
    return classes


def _check_batch(batch: object) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch is a {type(batch).__name__}: expected the keywords of the model's forward; "
            "give a list of such mappings, e.g. [{'input_ids': ids, 'attention_mask': mask}]"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients; every training flag is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
