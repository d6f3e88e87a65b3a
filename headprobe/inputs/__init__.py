"""Where models and texts come from: a hub name, a folder, the embedded default; files and stdin.

Importing this package is instant; torch and transformers are imported when a model is loaded.
"""

from headprobe.inputs.batches import TextBatches, batch_texts
from headprobe.inputs.models import Source, load_model
from headprobe.inputs.modules import build_module
from headprobe.inputs.texts import read_texts, sample_texts, short_texts

__all__ = [
    "Source",
    "TextBatches",
    "batch_texts",
    "build_module",
    "load_model",
    "read_texts",
    "sample_texts",
    "short_texts",
]
