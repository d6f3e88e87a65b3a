"""Batches of images or sounds, with texts beside them where the model reads both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headprobe.errors import HeadprobeError
from headprobe.inputs.batches import TextBatches, batch_texts
from headprobe.inputs.models import Source
from headprobe.inputs.processors import TEXT, keywords

if TYPE_CHECKING:
    from torch import Tensor

    Row = dict[str, Tensor]


@dataclass(frozen=True)
class Media:
    """Images or sounds as a model reads them.

    Attributes:
        kind: "images" or "sounds".
        rows: keywords of the model's forward for each of them, with a batch axis of 1.
        facts: what the summary says of them.
        seconds: name of an input -> seconds per step of its time axis.
    """

    kind: str
    rows: list[Row]
    facts: Mapping[str, object]
    seconds: Mapping[str, float] = field(default_factory=dict)


def batch_media(
    media: Media,
    source: Source,
    *,
    texts: Sequence[str] = (),
    max_tokens: int = 128,
    batch_size: int = 16,
) -> TextBatches:
    """Batches of images or sounds; neighbours of one shape are run together, nothing is padded.

    Beside texts there are as many images as texts: one of a kind is repeated, the longer list cut.
    A decoder gets the texts, or without any the tokens that a text starts with.

    Args:
        media: the images or sounds.
        source: the model.
        texts: for a model that reads both.
        max_tokens: longer texts are cut here.
        batch_size: how many are run at a time.

    Raises:
        HeadprobeError: if no text has a token.
    """
    rows, notes = media.rows, list[str]()
    described = TextBatches([], 0, 0, 0, 0, {}, None, None)
    if texts:
        texts, rows, notes = _as_many(list(texts), rows, media.kind)
        described = batch_texts(texts, source, max_tokens=max_tokens, batch_size=1)
        rows = rows[: described.texts]
    tokens = [dict(batch) for batch in described.batches] or [{} for _ in rows]
    decoder = "decoder_input_ids" in keywords(source.model)
    if decoder and TEXT not in source.reads:
        tokens = [_for_decoder(row.get("input_ids"), source) for row in tokens]
    merged = [_to_model({**text, **row}, source) for text, row in zip(tokens, rows, strict=True)]
    # Texts of unlike lengths are run together where a mask tells their padding.
    mask = "decoder_attention_mask" if decoder else "attention_mask"
    alike = rows if mask in keywords(source.model) else merged
    return replace(
        described,
        batches=[_joined(group) for group in _groups(merged, alike, batch_size)],
        texts=len(rows),
        tokens=described.tokens,
        media={media.kind: {media.kind: len(rows), **media.facts}},
        seconds=media.seconds,
        notes=tuple(notes),
    )


def _as_many(
    texts: list[str], rows: list[Row], kind: str
) -> tuple[list[str], list[Row], list[str]]:
    """As many texts as images or sounds, and what was done for it."""
    if len(texts) == len(rows):
        return texts, rows, []
    if len(rows) == 1:
        return texts, rows * len(texts), [f"the one of the {kind} was run with each text"]
    if len(texts) == 1:
        return texts * len(rows), rows, [f"the one text was run with each of the {kind}"]
    few = min(len(texts), len(rows))
    note = f"of {len(texts)} texts and {len(rows)} {kind} the first {few} were run, in pairs"
    return texts[:few], rows[:few], [note]


def _for_decoder(ids: Tensor | None, source: Source) -> Row:
    """The decoder's input: a text after the token that starts it, or what stands before it."""
    import torch

    start = getattr(source.model.config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(source.model.generation_config, "decoder_start_token_id", None)
    if ids is None and source.tokenizer is not None:
        empty = source.tokenizer("")["input_ids"]
        end = source.tokenizer.eos_token_id
        ids = torch.tensor([empty[:-1] if empty[-1:] == [end] else empty], dtype=torch.int64)
        return {"decoder_input_ids": _started(ids, start)}
    if ids is None:
        if start is None:
            raise HeadprobeError(
                f"{source.name!r} has a decoder and says not which token starts it: give its "
                "tokenizer's files, and texts with --text."
            )
        return {"decoder_input_ids": torch.tensor([[start]])}
    return {"decoder_input_ids": _started(ids, start)[:, : ids.shape[1]]}


def _started(ids: Tensor, start: int | None) -> Tensor:
    import torch

    if start is None or (ids.shape[1] and int(ids[0, 0]) == start):
        return ids
    return torch.cat([ids.new_full((1, 1), start), ids], dim=1)


def _to_model(row: Row, source: Source) -> Row:
    """On the model's device, numbers in its precision."""
    parameter = next(source.model.parameters())
    return {
        name: value.to(parameter.device, source.dtype if value.is_floating_point() else value.dtype)
        for name, value in row.items()
    }


def _groups(merged: list[Row], alike: list[Row], size: int) -> Iterable[list[Row]]:
    """Neighbours that have one shape in what must be alike."""
    shapes = [{name: value.shape for name, value in row.items()} for row in alike]
    start = 0
    for stop in range(1, len(merged) + 1):
        if stop == len(merged) or stop - start == size or shapes[stop] != shapes[start]:
            yield merged[start:stop]
            start = stop


def _joined(rows: list[Row]) -> dict[str, Any]:
    """One batch; tokens are padded on the right, and the mask says so."""
    import torch
    from torch.nn import functional as F

    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        length = max(value.shape[1] if value.dim() == 2 else 0 for value in values)
        if length and not values[0].is_floating_point():
            values = [F.pad(value, (0, length - value.shape[1])) for value in values]
        batch[name] = torch.cat(values)
    decoded = [row["decoder_input_ids"].shape[1] for row in rows if "decoder_input_ids" in row]
    if len(set(decoded)) > 1:
        lengths = torch.tensor(decoded, device=batch["decoder_input_ids"].device)
        index = torch.arange(max(decoded), device=lengths.device)
        batch["decoder_attention_mask"] = (index < lengths[:, None]).long()
    return batch
