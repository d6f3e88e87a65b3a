"""Measure the heads of a model on texts: `profile(model, batches) -> Profile`."""

import sys
from types import ModuleType
from typing import Any

from headprobe.profile.fingerprint import fingerprint
from headprobe.profile.given import from_attentions
from headprobe.profile.run import Sampling, profile
from headprobe.profile.sums import Layer, Profile
from headprobe.profile.tables import HEAD_KEY, glossary

__all__ = [
    "HEAD_KEY",
    "Layer",
    "Profile",
    "Sampling",
    "fingerprint",
    "from_attentions",
    "glossary",
    "profile",
]


class _Callable(ModuleType):
    # `headprobe.profile` is this package once anything has imported it, and the function of the
    # same name to everybody who reads the documentation: so it can be called.
    def __call__(self, *args: Any, **kwargs: Any) -> Profile:  # noqa: ANN401
        return profile(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
