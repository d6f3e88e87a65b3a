"""The hub of models and its cache: which commit a name stands for, and whether files came whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headprobe.errors import HeadprobeError
from headprobe.inputs.failures import explained, unreachable

_TIMEOUT = 8.0  # seconds
_SHA256 = 64  # hexadecimal digits
_GIT_SHA1 = 40


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model on the hub, as far as it is in the cache.

    Attributes:
        name: OWNER/NAME.
        folder: where the commit's files are in the cache; it is named by the commit.
        unreached: why the hub can't be asked for more; None if it can.
    """

    name: str
    folder: Path
    unreached: Exception | None

    @contextmanager
    def checked(self, weights: Callable[[Path], list[Path]]) -> Iterator[None]:
        """Refuse files that are not what the hub says, whether or not they could be read.

        The client does not look, and weights with wrong bytes load without an error. The cache
        names large files by their SHA-256, small ones by git's hash. What is damaged is removed
        from it, since it would be used for ever.

        Args:
            weights: those in a folder. They are compared even if nothing went wrong in the block.

        Raises:
            HeadprobeError: if a file is damaged, or the weights can't be fetched.
        """
        try:
            yield
        except Exception as error:
            _refuse_damaged(path for path in sorted(self.folder.rglob("*")) if path.is_file())
            if self.unreached and not weights(self.folder):
                raise _without_hub(self.unreached, self.name, None) from error
            raise
        # A mirror may name small files otherwise; one that loads gets the benefit of the doubt.
        used = weights(self.folder)
        _refuse_damaged(path for path in used if len(_blob(path).name) == _SHA256)


def snapshot(name: str, revision: str | None, files: tuple[str, ...]) -> Snapshot:
    """Find the commit that a branch or tag stands for, and fetch a file that it must have.

    Args:
        name: OWNER/NAME.
        revision: a branch, tag or commit; None is the main branch.
        files: names of files, the first that is there is fetched.

    Raises:
        HeadprobeError: if the hub gives no such model or revision, or none of these files, and the
            cache has none.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    unreached = _unreached(name, revision)
    offline = unreached is not None
    for number, file in enumerate(files, start=1):
        try:
            path = hf_hub_download(name, file, revision=revision, local_files_only=offline)
        except EntryNotFoundError as error:
            if number < len(files):
                continue
            if unreached:
                raise _without_hub(unreached, name, revision) from error
            raise explained(error, name, f"a {' or '.join(files)}", revision) from error
        except Exception as error:
            if unreached:
                raise _without_hub(unreached, name, revision) from error
            raise explained(error, name, f"a {file}", revision) from error
        return Snapshot(name, _top(Path(path), file), unreached)
    raise ValueError("files is empty: expected the names of some")


def _top(path: Path, file: str) -> Path:
    """The commit's folder, given a file in it that may lie in a folder of its own."""
    return path.parents[len(Path(file).parts) - 1]


def _without_hub(unreached: Exception, name: str, revision: str | None) -> HeadprobeError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(unreached, HfHubHTTPError | HFValidationError):
        return explained(unreached, name, "the model", revision)
    return unreachable(name, unreached)


def _unreached(name: str, revision: str | None) -> Exception | None:
    """One short request, since later ones retry for most of a minute without network.

    Returns:
        Why the hub can't be used; None if it can.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT)
    except Exception as error:  # offline mode, or what the HTTP client of the day raises
        return error
    return None


def _refuse_damaged(paths: Iterable[Path]) -> None:
    for path in paths:
        if not _is_damaged(path):
            continue
        again = "run again to download it"
        try:
            path.resolve().unlink()
            done = f"it was removed from the cache, {again}"
        except OSError as error:
            done = f"delete {path.resolve()} ({error.strerror}) and {again}"
        raise HeadprobeError(
            f"{path.name} came damaged (not the bytes that the hub names): {done}."
        )


def _blob(path: Path) -> Path:
    """What a file of the cache is a link to; itself where the cache works without links."""
    # A link's first hop is named by the content; a store behind it has names of its own.
    return path.parent / os.readlink(path) if path.is_symlink() else path


def _is_damaged(path: Path) -> bool:
    name = _blob(path).name
    if len(name) == _SHA256:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() != name
    if len(name) == _GIT_SHA1:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != name
    return False
