"""The folder of a run: it appears whole, or not at all."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headprobe.errors import HeadprobeError


@contextmanager
def run_folder(folder: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on a clean exit it takes that folder's place.

    If the block raises, or is interrupted, the temporary folder is removed and an old `folder`
    stays as it was. Whether an old folder may be replaced is settled before the block runs, so
    that a long run doesn't fail at its end.

    Args:
        folder: Where the results go. Missing parents are created.
        force: Replace a folder that doesn't hold an earlier run, too.

    Raises:
        HeadprobeError: `folder` can't be written or may not be replaced. If it can't be
            replaced at the end, the finished results stay in the temporary folder, and the
            message says where.
    """
    folder = Path(os.path.abspath(folder))  # not resolve(): a link must be seen as a link
    try:
        _check_replaceable(folder, force=force)
        created = _make_parents(folder.parent)
        temporary = _make_hidden(folder.parent, created)
    except OSError as error:
        raise HeadprobeError(
            f"The folder {folder} can't be written ({error.strerror}); choose another with --out."
        ) from error
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(created)
        raise
    _move_in_place(temporary, folder, force=force)


def _check_replaceable(folder: Path, *, force: bool) -> None:
    if folder.is_symlink():
        raise HeadprobeError(
            f"{folder} is a symbolic link, and replacing it could lose what it points to; "
            f"name the folder itself with --out."
        )
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise HeadprobeError(
            f"{folder} is a file where a folder was expected; choose another with --out."
        )
    if os.path.ismount(folder) or Path.cwd().is_relative_to(folder.resolve()):
        raise HeadprobeError(
            f"{folder} can't be replaced as a whole: it is a mount point, or holds the current "
            f"folder; name a folder inside it with --out."
        )
    if any(folder.iterdir()) and not (force or _holds_run(folder)):
        raise HeadprobeError(
            f"{folder} isn't empty and holds no earlier headprobe run; "
            f"choose another folder with --out, or replace this one with --force."
        )


def _holds_run(folder: Path) -> bool:
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(summary, dict) and summary.get("tool") == "headprobe"


def _make_parents(parent: Path) -> list[Path]:
    """Create a folder and its parents; return those that are new, the innermost first."""
    created = [p for p in (parent, *parent.parents) if not os.path.lexists(p)]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        _remove_empty(created)
        raise
    return created


def _make_hidden(parent: Path, created: list[Path]) -> Path:
    # Not tempfile.mkdtemp: it makes folders that nobody else may read, and this one stays.
    hidden = parent / f".headprobe-{secrets.token_hex(6)}"
    try:
        hidden.mkdir()
    except OSError:
        _remove_empty(created)
        raise
    return hidden


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _move_in_place(temporary: Path, folder: Path, *, force: bool) -> None:
    old = temporary.with_name(f"{temporary.name}-old")
    try:
        _check_replaceable(folder, force=force)  # again: it may have changed during the run
        if folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
    except (OSError, HeadprobeError) as error:
        raise HeadprobeError(
            f"The results are finished, but couldn't be moved to {folder}; "
            f"they are in {temporary}. {error}"
        ) from error
    shutil.rmtree(old, ignore_errors=True)
