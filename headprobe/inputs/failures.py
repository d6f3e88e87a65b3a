"""What can go wrong with a model from anywhere, each told in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headprobe.errors import HeadprobeError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

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


def explained(
    error: Exception, name: str, part: str, revision: str | None = None
) -> HeadprobeError:
    """The sentence for an error of the hub or of a reader, whatever it is wrapped in."""
    from pickle import UnpicklingError

    text = _from_hub(error, name, part, revision)
    if text:
        return HeadprobeError(text)
    if any(isinstance(link, UnpicklingError) for link in _chain(error)):
        return HeadprobeError(
            f"{part} of {name!r} are not plain tensors (damaged, or code that headprobe does not "
            "run): fetch the file again, or save it as safetensors."
        )
    if name.lower().endswith(".gguf"):
        return HeadprobeError(
            f"GGUF file {name!r} can't be loaded ({first_sentence(error)}): it is damaged or cut "
            "off, or of a kind that transformers doesn't read."
        )
    other = ", or name another by --tokenizer" if part == TOKENIZER else ""
    return HeadprobeError(
        f"{part} of {name!r} can't be loaded ({first_sentence(error)}): "
        f"check that all files are there, whole, and belong together{other}."
    )


def unreachable(name: str, reason: Exception) -> HeadprobeError:
    """The refusal of a model that neither the cache has nor a hub that can be reached."""
    return HeadprobeError(
        f"model {name!r} is no folder, is not in the cache or not whole, and the hub can't be "
        f"reached ({first_sentence(reason)}): check the network, HF_ENDPOINT and HF_HUB_OFFLINE, "
        "or name a folder."
    )


def _from_hub(error: Exception, name: str, part: str, revision: str | None) -> str | None:
    """The sentence for what the hub or the way to it did; None for anything else."""
    from huggingface_hub import errors as hub

    def first(kind: type[BaseException]) -> BaseException | None:
        return next((link for link in _chain(error) if isinstance(link, kind)), None)

    if first(hub.GatedRepoError):
        return (
            f"model {name!r} is gated: accept its conditions on its page on the hub, then run "
            "`hf auth login` or set HF_TOKEN."
        )
    if first(hub.RevisionNotFoundError):
        return f"model {name!r} has no revision {revision!r}: name a branch, a tag or a commit."
    if first(hub.RepositoryNotFoundError):
        return (
            f"there is no folder and no public hub model {name!r}: check the name; "
            "for a private model run `hf auth login` or set HF_TOKEN."
        )
    if first(hub.HFValidationError):
        return f"{name!r} is no folder and can't be a hub name: expected OWNER/NAME or a path."
    if isinstance(error, hub.EntryNotFoundError) and not first(hub.LocalEntryNotFoundError):
        return f"model {name!r} is on the hub, without {part}: expected a transformers model."
    answer = first(hub.HfHubHTTPError)
    if isinstance(answer, hub.HfHubHTTPError) and not isinstance(answer, hub.EntryNotFoundError):
        return _refused(answer, name)
    if first(hub.LocalEntryNotFoundError) or first(hub.OfflineModeIsEnabled):
        return str(unreachable(name, error))
    # The base of all that the HTTP client raises; which client it is depends on the version.
    if broken := first(hub.HfHubHTTPError.__bases__[0]):
        return f"{part} of {name!r} did not come ({first_sentence(broken)}): run again."
    return None


def _refused(answer: HfHubHTTPError, name: str) -> str:
    status = answer.response.status_code
    said = answer.response.headers.get("X-Error-Message", "").rstrip(".")
    why = f"the hub answers {status} for model {name!r}" + (f" ({said})" if said else "")
    if status in (401, 403):
        return f"{why}: check the token (HF_TOKEN, `hf auth login`) and what it may read."
    return f"{why}, and it is not in the cache or not whole: try again later."


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


def first_sentence(error: BaseException) -> str:
    """What an error says, cut to what fits into a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # a heading
        lines[0] = " ".join(line.strip() for line in lines[:2])
    return re.split(r"\. ", lines[0])[0].rstrip(".")[:200]
