"""Where a model runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprobe.errors import HeadprobeError

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one (cuda, else mps), else the CPU.

    Raises:
        HeadprobeError: if there is no such device, or it computes nothing.
    """
    import torch

    if name == "auto":
        name = _best_device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            there.append("mps")
        raise HeadprobeError(
            f"device {name!r} is unknown or not available: this machine has {', '.join(there)}."
        ) from error
    if device.type == "meta":
        raise HeadprobeError("device 'meta' computes nothing: use 'cpu' or 'cuda'.")
    return device


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
