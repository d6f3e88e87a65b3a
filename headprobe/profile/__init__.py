"""Measure the heads of a model on texts: `profile(model, batches) -> Profile`."""

from headprobe.profile.run import Sampling, fingerprint, profile
from headprobe.profile.sums import Layer, Profile
from headprobe.profile.tables import HEAD_KEY, glossary

__all__ = ["HEAD_KEY", "Layer", "Profile", "Sampling", "fingerprint", "glossary", "profile"]
