"""What can go wrong with a model from anywhere, each told in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from headprobe.errors import HeadprobeError

TOKENIZER = "the tokenizer"


@contextmanager
def explaining(address: str, part: str) -> Iterator[None]:
    """Turn whatever loading raises into one sentence; memory that ran out stays what it is."""
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, HeadprobeError):
        raise
    except Exception as error:  # files from anywhere break their readers in every way
        raise explained(error, address, part) from error


def explained(error: Exception, name: str, part: str) -> HeadprobeError:
    """The sentence for an error of the hub or of a reader, whatever it is wrapped in."""
    from pickle import UnpicklingError

    from huggingface_hub import errors as hub

    kinds = tuple(type(link) for link in _chain(error))

    def is_a(kind: type) -> bool:
        return any(issubclass(one, kind) for one in kinds)

    if is_a(hub.GatedRepoError):
        text = f"model {name!r} is gated: accept its terms on the hub and run `hf auth login`."
    elif is_a(hub.RepositoryNotFoundError):
        text = (
            f"there is no folder and no public hub model {name!r}: check the name; "
            "for a private model run `hf auth login`."
        )
    elif is_a(hub.HFValidationError):
        text = f"{name!r} is no folder and can't be a hub name: expected OWNER/NAME or a path."
    elif is_a(hub.LocalEntryNotFoundError) or is_a(hub.OfflineModeIsEnabled):
        text = (
            f"model {name!r} is no folder, is not in the cache, and the hub can't be reached: "
            "check the network and HF_HUB_OFFLINE, or name a folder."
        )
    elif is_a(UnpicklingError):
        text = (
            f"{part} of {name!r} are not plain tensors (damaged, or code that headprobe does not "
            "run): fetch the file again, or save it as safetensors."
        )
    elif name.lower().endswith(".gguf"):
        text = (
            f"GGUF file {name!r} can't be loaded ({first_sentence(error)}): it is damaged or cut "
            "off, or of a kind that transformers doesn't read."
        )
    else:
        text = (
            f"{part} of {name!r} can't be loaded ({first_sentence(error)}): "
            "check that all files are there, whole, and belong together"
            f"{', or name another by --tokenizer' if part == TOKENIZER else ''}."
        )
    return HeadprobeError(text)


def needs_extra(packages: list[str], extra: str, purpose: str) -> None:
    """Refuse what an optional part of the installation is missing for.

    Raises:
        HeadprobeError: if one of the packages is not installed.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise HeadprobeError(
            f"{purpose} needs {' and '.join(missing)}, not installed here: "
            f'run pip install "headprobe[{extra}]".'
        )


def needs_code(address: str) -> HeadprobeError:
    """The refusal of a model whose own code the user has not asked for."""
    return HeadprobeError(
        f"model {address!r} needs Python code that comes with it: "
        "read that code, and if you trust it, pass --trust-remote-code."
    )


def needs_pillow() -> HeadprobeError:
    """The refusal of images where nothing is installed that reads them."""
    return HeadprobeError('images are read with Pillow: run pip install "headprobe[images]".')


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_sentence(error: Exception) -> str:
    """What an error says, cut to what fits into a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # a heading
        lines[0] = " ".join(line.strip() for line in lines[:2])
    return re.split(r"\. ", lines[0])[0].rstrip(".")[:200]
