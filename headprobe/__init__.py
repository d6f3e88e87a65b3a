"""What does each attention head of a transformer do, and which ones are redundant?

`import headprobe` is instant: torch is imported when a name that needs it is first used.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "AttentionCall": "headprobe.capture",
    "Capture": "headprobe.capture",
    "Diagnosis": "headprobe.diagnosis",
    "Examination": "headprobe.doctor",
    "HeadprobeError": "headprobe.errors",
    "MultiHeadAttention": "headprobe.attention",
    "NoAttentionError": "headprobe.errors",
    "Profile": "headprobe.profile",
    "Sampling": "headprobe.profile",
    "attention_weights": "headprobe.attention",
    "diagnose": "headprobe.diagnosis",
    "examine": "headprobe.doctor",
    "from_attentions": "headprobe.profile",
    "write_report": "headprobe.analysis",
}

# `headprobe.profile` is the package and, called, the function of that name in it.
__all__ = ["profile", *_HOMES]


def __getattr__(name: str) -> object:
    if name == "profile":
        return importlib.import_module("headprobe.profile")
    if name not in _HOMES:
        raise AttributeError(f"module 'headprobe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
