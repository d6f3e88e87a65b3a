"""The files that a person names: themselves, or all of a kind in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from headprobe.errors import HeadprobeError


def files_of(paths: Iterable[str | Path], suffixes: Iterable[str], what: str) -> list[Path]:
    """The named files, and in place of a folder its files of these kinds, by name.

    Args:
        paths: files and folders.
        suffixes: such as ".png"; of files in folders only.
        what: what is in the files, for the errors: "image".

    Raises:
        HeadprobeError: if there is no such path, or a folder has no such file.
    """
    known, found = frozenset(suffixes), list[Path]()
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise HeadprobeError(f"{what} {str(given)!r} does not exist: check the path.")
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in known and p.is_file())
        if not inside:
            raise HeadprobeError(
                f"folder {str(given)!r} has no {what} ({_few(sorted(known))}): name "
                "another folder, or the files."
            )
        found += inside
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
