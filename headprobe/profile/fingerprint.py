"""Tells models apart by their weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from headprobe.errors import HeadprobeError


def fingerprint(model: nn.Module) -> str:
    """Tells models apart: a hash of the names, types, shapes and contents of all parameters.

    Of the contents, the sum of each row's bits as integers: that is exact on every device, as fast
    as the memory, and sees a change of a single weight.

    Raises:
        HeadprobeError: if a weight has no content.
    """
    digest = hashlib.sha256()
    for name, parameter in model.state_dict().items():
        if not isinstance(parameter, Tensor) or not parameter.numel():
            continue
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        content = _offloaded(model, name) if parameter.is_meta else parameter
        rows = content.detach().reshape(len(content) if content.dim() > 1 else 1, -1)
        digest.update(_bits(rows).sum(dim=1, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _bits(rows: Tensor) -> Tensor:
    """The rows as integers, as long ones as there can be: their sum then needs no conversion."""
    wide = rows.contiguous()
    size = wide.element_size()
    if wide.shape[1] * size % 8 == 0 and wide.storage_offset() * size % 8 == 0:
        return wide.view(torch.int64)
    return wide.view(_INTEGERS[size])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _offloaded(model: nn.Module, name: str) -> Tensor:
    """A weight that accelerate keeps elsewhere while its module isn't running."""
    owner, _, own_name = name.rpartition(".")
    module = model.get_submodule(owner)
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device

        with align_module_device(module):
            content: Tensor = getattr(module, own_name)
        if not content.is_meta:
            return content
    raise HeadprobeError(
        f"weight {name!r} has no content (it is on the device 'meta'): load the model's weights."
    )
