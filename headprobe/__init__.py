"""What does each attention head of a transformer do, and which ones are redundant?

`import headprobe` is instant: torch is imported when a name that needs it is first used.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "attention_weights": "headprobe.attention",
    "MultiHeadAttention": "headprobe.attention",
    "HeadprobeError": "headprobe.errors",
    "NoAttentionError": "headprobe.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'headprobe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
