"""Texts -> padded batches of token ids that a model's forward takes as keywords."""

from __future__ import annotations

import hashlib
import inspect
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.limits import word_embeddings
from headprobe.inputs.models import Source

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

# What a tokenizer decodes half a character to; Unicode calls it a symbol, but it is none.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# SentencePiece's mark for a space. Unicode calls it a symbol too.
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True)
class TextBatches:
    """Tokenised texts in their order, with right padding.

    Attributes:
        batches: keywords of the model's forward: `input_ids` and, where it takes them,
            `attention_mask`, `token_type_ids`, `decoder_input_ids`, `decoder_attention_mask`; each
            int64 [batch, tokens], on the model's device.
        texts: how many texts the batches hold.
        tokens: how many tokens they hold, special ones included, padding not.
        cut: how many of the texts were cut at `max_tokens`.
        skipped: how many texts were left out because they have no token of their own.
        token_classes: "special": all special ids of the tokenizer; "punctuation": those ids in the
            batches that stand for punctuation or symbols only.
        max_tokens: the limit that was used, special tokens included; None: there was none.
        texts_hash: SHA-256 of the texts that the batches hold; None if there are no texts.
        batch_first: whether tensors are [batch, tokens, ...], not [tokens, batch, ...].
        media: "images" or "sounds" -> what the summary says of those in the batches.
        seconds: name of an input that is sound -> seconds per step.
        notes: what a person should know of how the batches were made.
    """

    batches: list[dict[str, Any]]
    texts: int
    tokens: int
    cut: int
    skipped: int
    token_classes: Mapping[str, Iterable[int]]
    max_tokens: int | None
    texts_hash: str | None
    batch_first: bool = True
    media: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def counted(self) -> str:
        """What the batches hold, and how many: "88 texts"."""
        kinds = [*self.media, *(["texts"] if self.texts_hash or not self.media else [])]
        return " and ".join(f"{self.texts} {kind}" for kind in kinds)


def batch_texts(
    texts: Sequence[str], source: Source, *, max_tokens: int = 128, batch_size: int = 16
) -> TextBatches:
    """Tokenise texts with the model's own tokenizer, special tokens included.

    Padding is on the right, whatever the tokenizer would do, and neither tokenizer nor model
    is changed for it. An encoder-decoder model's decoder gets the same text, shifted right.

    Args:
        texts: the texts; those without a token of their own are skipped and counted.
        source: the model and its tokenizer.
        max_tokens: longer texts are cut here, or at the model's last position if that comes first.
        batch_size: texts in a batch. A model that takes no mask gets one text at a time: to it,
            padding would be text.

    Raises:
        ValueError: if `max_tokens` or `batch_size` is too small.
        HeadprobeError: if no text has a token, or the tokenizer has ids that the model has not.
    """
    if isinstance(texts, str):
        raise TypeError("texts is one string: expected a list of strings.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected 1 or more.")
    limit = min(max_tokens, source.max_positions or max_tokens)
    rows, used, cut = _tokenise(list(texts), source, limit)
    size = batch_size if "attention_mask" in _keywords(source.model) else 1
    return TextBatches(
        batches=[_batch(rows[i : i + size], source) for i in range(0, len(rows), size)],
        texts=len(rows),
        tokens=sum(len(row["input_ids"]) for row in rows),
        cut=cut,
        skipped=len(texts) - len(rows),
        token_classes=_token_classes(rows, source.reader),
        max_tokens=limit,
        texts_hash=_hash(used),
    )


def _tokenise(
    texts: list[str], source: Source, limit: int
) -> tuple[list[dict[str, list[int]]], list[str], int]:
    """The tokenizer's lists per text that has tokens; these texts; how many of them were cut."""
    tokenizer = source.reader
    added = len(tokenizer("")["input_ids"])  # special tokens alone
    if limit <= added:
        raise ValueError(
            f"max_tokens is {limit}: expected {added + 1} or more, since the tokenizer adds "
            f"{added} special tokens to every text."
        )
    encoded: Mapping[str, list[list[int]]] = {"input_ids": []}  # no tokenizer takes an empty list
    if texts:
        encoded = tokenizer(texts, truncation=True, max_length=limit, padding=False, verbose=False)
    names = [name for name in encoded if name in ("input_ids", "token_type_ids")]
    kept = [i for i in range(len(texts)) if len(encoded["input_ids"][i]) > added]
    if not kept:
        raise HeadprobeError(f"none of the {len(texts)} texts has a token: give other texts.")
    rows = [{name: encoded[name][i] for name in names} for i in kept]
    _check_ids(rows, source)
    used = [texts[i] for i in kept]
    # Only a text at the limit can have been cut; whole, it tells.
    full = [text for row, text in zip(rows, used, strict=True) if len(row["input_ids"]) >= limit]
    cut = sum(len(tokenizer(text, verbose=False)["input_ids"]) > limit for text in full)
    return rows, used, cut


def _check_ids(rows: Iterable[dict[str, list[int]]], source: Source) -> None:
    largest = max(max(row["input_ids"]) for row in rows)
    vocabulary = getattr(word_embeddings(source.model), "num_embeddings", None)
    if vocabulary is not None and largest >= vocabulary:
        raise HeadprobeError(
            f"the tokenizer of {source.name!r} has token id {largest}, its model only ids below "
            f"{vocabulary}: use the tokenizer that the model was trained with."
        )


def _keywords(model: nn.Module) -> frozenset[str]:
    """What the model's forward takes, as far as this module can give it."""
    parameters = inspect.signature(model.forward).parameters
    known = {"input_ids", "attention_mask"}
    if "input_ids" not in parameters:  # a wrapper: forward(*args, **kwargs)
        return frozenset(known)
    decoder = {"decoder_input_ids", "decoder_attention_mask"}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        known |= decoder
    return frozenset((known | {"token_type_ids"}) & parameters.keys())


def _batch(rows: list[dict[str, list[int]]], source: Source) -> dict[str, Tensor]:
    """Pad rows on the right; the keywords [batch, tokens] that the model takes."""
    import torch

    length = max(len(row["input_ids"]) for row in rows)
    device = source.device

    def padded(lists: Iterable[list[int]], fill: int) -> Tensor:
        full = [values + [fill] * (length - len(values)) for values in lists]
        return torch.tensor(full, dtype=torch.int64, device=device)

    pad = _pad_id(source.reader)
    keywords = _keywords(source.model)
    mask = padded(([1] * len(row["input_ids"]) for row in rows), 0)
    batch = {
        "input_ids": padded((row["input_ids"] for row in rows), pad),
        "attention_mask": mask,
    }
    if "token_type_ids" in keywords and "token_type_ids" in rows[0]:
        batch["token_type_ids"] = padded((row["token_type_ids"] for row in rows), 0)
    if "decoder_input_ids" in keywords:
        start = _decoder_start(source)
        batch["decoder_input_ids"] = padded(([start, *row["input_ids"][:-1]] for row in rows), pad)
        batch["decoder_attention_mask"] = mask.clone()
    return {name: value for name, value in batch.items() if name in keywords}


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    # Any id will do where there is no pad token: the mask hides it.
    return _first_known(tokenizer.pad_token_id, tokenizer.eos_token_id, 0)


def _decoder_start(source: Source) -> int:
    configs = [source.model.config, getattr(source.model, "generation_config", None)]
    starts = [getattr(config, "decoder_start_token_id", None) for config in configs]
    tokenizer = source.reader
    return _first_known(*starts, tokenizer.bos_token_id, _pad_id(tokenizer))


def _first_known(*ids: int | None) -> int:
    return next(token for token in ids if token is not None)


def _token_classes(
    rows: Iterable[dict[str, list[int]]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, frozenset[int]]:
    special = frozenset(tokenizer.all_special_ids)
    others = {token for row in rows for token in row["input_ids"]} - special
    return {"special": special, "punctuation": _punctuation(others, tokenizer)}


def _punctuation(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    def decode(token: int) -> str:
        text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text.replace(_SPACE_MARK, " ").strip()

    return frozenset(token for token in ids if _is_punctuation(decode(token)))


def _is_punctuation(text: str) -> bool:
    return (
        bool(text)
        and _REPLACEMENT not in text
        and all(unicodedata.category(character)[0] in "PS" for character in text)
    )


def _hash(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        # A NUL can't be in a text that was read, so other splits give other hashes.
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
