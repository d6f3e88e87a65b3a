"""What a person sees in the terminal: progress, results, errors in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from headprobe.errors import HeadprobeError

if TYPE_CHECKING:
    from headprobe.report import Tables

Item = TypeVar("Item")

_OUT_OF_MEMORY = (
    "out of memory: run fewer texts at a time (--batch-size), shorter ones (--max-tokens), or a "
    "smaller precision (--dtype)"
)


@contextmanager
def plain_errors(*, debug: bool) -> Iterator[None]:
    """Turn what went wrong into one sentence and exit code 1; with `debug`, show the traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.ClickException("stopped; nothing was written.") from None
    except (HeadprobeError, ValueError, OSError, MemoryError, RuntimeError) as error:
        if debug:
            raise
        raise click.ClickException(_sentence(error)) from error


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """The items, with a progress bar and the time left on standard error."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, label, console=console, transient=True, disable=not console.is_terminal)


def results(tables: Tables, folder: Path) -> None:
    """Print the verdict, a line per layer, and what was written."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    several = tables.layers[["kind", "stack"]].drop_duplicates().shape[0] > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "heads", "entropy / max", "distance", "JS similarity"):
        table.add_column(name, justify="right")
    table.add_column("similar heads")
    for row in tables.layers.to_dict("records"):
        groups = tables.groups
        for name in ("kind", "stack", "layer"):
            groups = groups[groups[name] == row[name]]
        stream = f"{row['stack']} {row['kind']} ".lstrip() if several else ""
        table.add_row(
            escape(f"{stream}{row['layer']}"),
            str(row["heads"]),
            _number(row["entropy_normalized_mean"]),
            _number(row["distance_mean"]),
            _number(row["js_similarity_mean"]),
            "  ".join(heads.replace(";", "+") for heads in groups["heads"]),
        )
    console.print(table)
    console.print(f"\n{escape(tables.summary['verdict'])}")
    for left in tables.summary["left_out"]:
        console.print(escape(f"Left out: {left['site']}: {left['reason']}."))
    console.print("Layers and heads count from 0; means over the heads of a layer.")
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    console.print(f"\nWritten to {escape(str(folder))}: {names}", soft_wrap=True)


def _number(value: float) -> str:
    return "" if value != value else f"{value:.3g}"  # NaN: not measured


def _sentence(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return _OUT_OF_MEMORY
    if "not enough memory" in text.lower():  # torch's allocator on the CPU
        return _OUT_OF_MEMORY
    return text if isinstance(error, HeadprobeError | ValueError) else f"{_kind(error)}: {text}"


def _kind(error: BaseException) -> str:
    return f"the run failed ({type(error).__name__}; --debug shows where)"
