"""Where models, texts, images and sounds come from: the hub, folders, files, embedded samples.

Importing this package is instant; torch and transformers are imported when a model is loaded.
"""

from headprobe.inputs.audio import read_sounds, sample_sounds
from headprobe.inputs.batches import TextBatches, batch_texts
from headprobe.inputs.choice import Choice, batch_inputs
from headprobe.inputs.images import read_images, sample_images
from headprobe.inputs.models import Parts, Source, load_model
from headprobe.inputs.modules import build_module
from headprobe.inputs.texts import read_texts, sample_texts, short_texts

__all__ = [
    "Choice",
    "Parts",
    "Source",
    "TextBatches",
    "batch_inputs",
    "batch_texts",
    "build_module",
    "load_model",
    "read_images",
    "read_sounds",
    "read_texts",
    "sample_images",
    "sample_sounds",
    "sample_texts",
    "short_texts",
]
