"""What is known of the texts of a batch: padding, token classes, resampling block, sampled rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprobe.capture import LEARNED, is_content, visible_keys
from headprobe.errors import HeadprobeError
from headprobe.statistics import BLOCKS

SHORT_TEXT = 64
"""Texts of at most this many tokens are compared on all their rows."""

TOKEN_CLASSES = ("special", "punctuation")
"""The classes of tokens that there are statistics for."""


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of one batch.

    Attributes:
        inputs: what the model is called with, by keyword.
        keys: a 64-bit hash of each text's tokens and the seed; block and sampled rows follow from
            it, so they depend neither on the batch nor on padding.
        valid: input name -> True for tokens, False for padding, [batch, positions].
        classes: input name -> token class -> True for the tokens in it, [batch, positions].
        seconds: input name -> how long one of its steps lasts, for inputs that are sound.
    """

    inputs: Mapping[str, Any]
    keys: tuple[int, ...]
    valid: Mapping[str, Tensor]
    classes: Mapping[str, Mapping[str, Tensor]]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def blocks(self) -> Tensor:
        """The resampling block of each text, [batch]."""
        return torch.tensor([key % BLOCKS for key in self.keys])

    @property
    def is_padded(self) -> bool:
        """Whether there is padding in any input."""
        return not all(bool(mask.all()) for mask in self.valid.values())

    @property
    def tokens(self) -> int:
        """Tokens of the first input (positions of the first mask, padding left out)."""
        return next((int(mask.sum()) for mask in self.valid.values()), 0)

    @property
    def class_tokens(self) -> dict[str, dict[str, int]]:
        """Input name -> token class -> how many of the input's tokens are in it."""
        return {
            stream: {
                name: int((members & self.valid[stream]).sum()) for name, members in classes.items()
            }
            for stream, classes in self.classes.items()
        }

    def mask(self, stream: str | None, length: int, device: torch.device) -> Tensor | str:
        """True for the tokens of an input, [batch, length], or why there is no such mask."""
        mask = self.valid.get(stream or "")
        if mask is not None and len(mask) != len(self):
            return f"{stream!r} has {len(mask)} sequences, the batch has {len(self)} texts"
        if mask is not None and mask.shape[1] != length and bool(mask.all()):
            mask = None  # the model added positions of its own, and no text has padding
        if mask is None or stream == LEARNED:
            if stream is None and self.is_padded:
                return "it can't be told from which input its positions come, so where padding is"
            return torch.ones(len(self), length, dtype=torch.bool, device=device)
        if mask.shape[1] != length:
            return f"it has {length} positions, the mask of {stream!r} has {mask.shape[1]}"
        return mask.to(device)

    def classes_of(
        self, stream: str | None, length: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """Token class -> [batch, length], for an input of token ids."""
        classes = self.classes.get(stream or "", {})
        return {
            name: members.to(device)
            for name, members in classes.items()
            if members.shape[1] == length
        }

    def windows(self, sequences: Sequence[int]) -> Texts:
        """The windows of these sequences, each a text of its own in the block of the whole.

        Args:
            sequences: which of the texts each window is cut from.
        """
        met: Counter[int] = Counter()
        keys = []
        for text in sequences:
            keys.append(_window_key(self.keys[text], met[text]))
            met[text] += 1
        return Texts({}, tuple(keys), {}, {}, self.seconds)

    def sample(self, valid: Tensor, rows: int | None) -> tuple[Tensor, Tensor]:
        """Query rows on which heads are compared.

        Args:
            valid: True for tokens, [batch, queries].
            rows: how many of a text that is not short; None for all.

        Returns:
            Row indices, [batch, chosen], in the order of the draw; texts with fewer rows repeat
            one of theirs. And which are no such repetition, [batch, chosen].
        """
        chosen = [
            _sample(key, mask.nonzero()[:, 0].cpu().numpy(), rows)
            for key, mask in zip(self.keys, valid, strict=True)
        ]
        width = max(1, *map(len, chosen))
        index = np.zeros((len(self), width), dtype=np.int64)
        real = np.zeros((len(self), width), dtype=bool)
        for text, positions in enumerate(chosen):
            index[text] = positions[0] if len(positions) else 0
            index[text, : len(positions)] = positions
            real[text, : len(positions)] = True
        return torch.from_numpy(index).to(valid.device), torch.from_numpy(real).to(valid.device)


def read_batch(
    batch: Mapping[str, Any],
    *,
    seed: int,
    token_classes: Mapping[str, Iterable[int]],
    batch_first: bool = True,
) -> Texts:
    """Work out what is known of a batch.

    Args:
        batch: keywords of the model's forward. `attention_mask` belongs to `input_ids`,
            `decoder_attention_mask` to `decoder_input_ids` and `encoder_attention_mask` to
            `encoder_hidden_states`; 1 is a token, 0 is padding.
            In torch's `..._key_padding_mask` True is padding.
        seed: goes into the hash of each text.
        token_classes: class -> token ids.
        batch_first: whether contents are [batch, positions, ...], not [positions, batch, ...].

    Raises:
        ValueError: if nothing in the batch has a batch axis and positions, there is no text in it,
            or a mask has other axes or entries than a mask of padding.
        TypeError: if a mask is no tensor.
        HeadprobeError: if a text has no token.
    """
    contents = {
        name: value if batch_first else value.transpose(0, 1)
        for name, value in batch.items()
        # What is told about a text is not the text: it may change with the padding.
        if isinstance(value, Tensor) and value.dim() >= 2 and is_content(name)
    }
    if not contents:
        raise ValueError(
            f"a batch has {', '.join(map(repr, batch)) or 'nothing'}: expected a tensor "
            "[batch, positions, ...] that the model reads, such as input_ids"
        )
    empty = next((name for name, content in contents.items() if not len(content)), None)
    if empty is not None:
        raise ValueError(f"{empty} is {list(contents[empty].shape)}: the batch has no text")
    valid = {name: mask for name in contents if (mask := _mask(name, contents, batch)) is not None}
    ids = {
        name: value.long()
        for name, value in contents.items()
        if value.dtype in _IDS and value.dim() == 2
    }
    for name, tokens in ids.items():
        valid.setdefault(name, torch.ones_like(tokens, dtype=torch.bool))
    _check_tokens(valid)
    classes = {
        name: {
            group: torch.isin(tokens, torch.tensor(sorted(members), device=tokens.device))
            for group, members in token_classes.items()
        }
        for name, tokens in ids.items()
    }
    media = {name: value for name, value in contents.items() if name in _MEDIA}
    hashed = ids | media or contents
    keys = tuple(
        _key(text, hashed, valid, seed) for text in range(len(next(iter(hashed.values()))))
    )
    return Texts(batch, keys, valid, classes)


_IDS = (torch.int64, torch.int32)
_SOUND = ("input_features", "input_values")
_MEDIA = ("pixel_values", *_SOUND)  # many of them may go with the same ids


def mask_of(stream: str) -> str:
    """The name of the mask that tells the padding of an input."""
    side, _, rest = stream.partition("_")
    return f"{side}_attention_mask" if rest and side in ("encoder", "decoder") else "attention_mask"


def _mask(name: str, contents: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor | None:
    """True for the tokens of an input, or None if nothing tells them from padding."""
    told = _key_padding_mask(name, batch)
    if told is not None or (name in _MEDIA and "input_ids" in contents):  # it is the texts' mask
        return told
    mask_name = mask_of(name)
    mask, axes = batch.get(mask_name), list(contents[name].shape[:2])
    if isinstance(mask, list | tuple | np.ndarray | str):
        raise TypeError(f"{mask_name} is a {type(mask).__name__}: expected a tensor {axes}")
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() > 2:
        _check_hides_no_key(mask_name, mask)
        return None
    if not bool((mask >= 0).all()):
        raise ValueError(
            f"{mask_name} has negative entries or NaN: expected 1 for a token and 0 for padding, "
            "not what is added to scores"
        )
    ids = batch.get("input_ids")
    is_of_ids = isinstance(ids, Tensor) and ids.shape == mask.shape
    if name in _SOUND and not is_of_ids:
        # A model shortens sound before it attends: the observer sees whether the lengths agree.
        return None if bool(mask.all()) else mask.bool()
    if list(mask.shape) == axes:
        return mask.bool()
    if name.endswith("input_ids"):
        raise ValueError(
            f"{mask_name} is {list(mask.shape)}, {name} is {axes}: expected the same axes"
        )
    return None


def _key_padding_mask(name: str, batch: Mapping[str, Any]) -> Tensor | None:
    """The same, where it is told as torch's own layers like it: True is padding."""
    paddings = [f"{name}_key_padding_mask"]
    if batch.get("key", batch[name]) is batch[name]:  # not the queries of cross-attention
        paddings.append("key_padding_mask")
    for padding in paddings:
        mask = batch.get(padding)
        if isinstance(mask, Tensor):
            return ~mask if mask.dtype == torch.bool else mask == 0
    return None


def _check_hides_no_key(name: str, mask: Tensor) -> None:
    """A mask of queries by keys may make attention causal; which queries are padding it can't say.

    Raises:
        ValueError: if it hides a key from every query, as padding is hidden.
    """
    added = mask.is_floating_point() and bool((mask < 0).any())
    allowed = visible_keys(mask) if added else mask.bool()
    if not bool(allowed.any(dim=-2).all()):
        raise ValueError(
            f"{name} has {mask.dim()} axes and hides keys from every query: give it as [batch, "
            "positions], 1 for a token and 0 for padding, so that padding can be told from tokens"
        )


def _check_tokens(valid: Mapping[str, Tensor]) -> None:
    for name, mask in valid.items():
        empty = (~mask.any(dim=1)).nonzero()[:, 0].tolist()
        if empty:
            raise HeadprobeError(
                f"text {empty[0]} of a batch has no token in {name!r}, only padding: leave it out"
            )


def _key(text: int, contents: Mapping[str, Tensor], valid: Mapping[str, Tensor], seed: int) -> int:
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8)
    for name, tensor in contents.items():
        row, mask = tensor[text], valid.get(name)
        if mask is not None and mask.shape[1] == row.shape[0]:
            row = row[mask[text]]
        row = row.float() if row.is_floating_point() else row
        digest.update(name.encode() + row.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _window_key(key: int, number: int) -> int:
    """The key of a text's window: rows of its own, the block of the whole text."""
    digest = hashlib.blake2b(f"{key} {number}".encode(), digest_size=7)
    return int.from_bytes(digest.digest(), "little") * BLOCKS + key % BLOCKS


def _sample(key: int, positions: np.ndarray[Any, Any], rows: int | None) -> np.ndarray[Any, Any]:
    if rows is None:
        return positions
    drawn = np.random.default_rng(key).permutation(len(positions))
    return positions[drawn if len(positions) <= SHORT_TEXT else drawn[:rows]]
