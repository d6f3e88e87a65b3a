"""Token ids, padded on the right; and as many image tokens in them as the model wants."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from scripts.sweep.configs import VOCABULARY
from scripts.sweep.spec import AUDIO_TOKEN, BATCH, IMAGE_TOKEN, LENGTH, PADDED, Inputs, Spec, ids

_NUMBERS = re.compile(r"(?:tokens|features):? *\(?(\d+)")


def text(spec: Spec) -> Iterator[Inputs]:
    """Token ids with all that belongs to them; then with less, and for several codebooks."""
    if "input_ids" not in spec.parameters:
        return
    inputs = padded_text(spec)
    yield inputs
    books = spec.find("num_codebooks", "n_codebooks", "audio_channels_in", "num_vq")
    if isinstance(books, int):
        yield {**inputs, "input_ids": ids(spec, LENGTH * books).view(BATCH, LENGTH, books)}
        yield {"input_ids": ids(spec, LENGTH * books).view(BATCH * books, LENGTH)}
        if "decoder_input_ids" in inputs:
            yield {**inputs, "decoder_input_ids": ids(spec, 5 * books).view(BATCH * books, 5)}
    yield {"input_ids": inputs["input_ids"]}
    if "decoder_input_ids" in inputs:
        yield {name: value for name, value in inputs.items() if name != "decoder_input_ids"}


def padded_text(spec: Spec) -> Inputs:
    """Token ids and what else the forward takes with them; nothing if it takes none."""
    if "input_ids" not in spec.parameters:
        return {}
    tokens = ids(spec)
    mask = torch.ones_like(tokens)
    mask[-1, -PADDED:] = 0
    pad = spec.find("pad_token_id")
    if isinstance(pad, int) and 0 <= pad < VOCABULARY:
        tokens[mask == 0] = pad
    inputs: Inputs = {"input_ids": tokens}
    if "attention_mask" in spec.parameters:
        inputs["attention_mask"] = mask
    if "bbox" in spec.parameters:
        inputs["bbox"] = torch.tensor([1, 2, 5, 6]).expand(BATCH, LENGTH, 4).clone()
    if "decoder_input_ids" in spec.parameters:
        inputs["decoder_input_ids"] = ids(spec, 5)
    if "visual_feats" in spec.parameters:
        inputs["visual_feats"] = torch.randn(BATCH, 6, spec.find("visual_feat_dim"))
        inputs["visual_pos"] = torch.rand(BATCH, 6, spec.find("visual_pos_dim"))
    if "image_embeds_position_mask" in spec.parameters:
        images = torch.zeros_like(tokens)
        images[:, 1 : 1 + int(spec.find("latent_query_num", default=1))] = 1
        inputs["image_embeds_position_mask"] = images
    return inputs


def with_placeholders(model: PreTrainedModel, inputs: Inputs, error: str) -> Inputs | None:
    """The inputs with as many image or sound tokens as there are features, told by the error."""
    numbers = [int(number) for number in _NUMBERS.findall(error)]
    token = Spec(model).token(AUDIO_TOKEN if re.search("audio", error, re.I) else IMAGE_TOKEN)
    if "do not match" not in error or len(numbers) != 2 or token is None:
        return None
    if numbers[0] == numbers[1]:  # the features' entries were counted, not the features
        numbers[1] //= model.get_input_embeddings().weight.shape[-1]
    each = numbers[1] // BATCH
    if "input_ids" not in inputs or not 0 < each <= 4096:
        return None
    words = inputs["input_ids"]
    words = words[words != token].view(BATCH, -1)
    words = torch.cat([words[:, :1], torch.full((BATCH, each), token), words[:, 1:]], dim=1)
    mask = torch.ones_like(words)
    mask[-1, -PADDED:] = 0
    changed = {"input_ids": words, "attention_mask": mask}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            changed[name] = (words == token).long()
    return {**inputs, **changed}
