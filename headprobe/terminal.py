"""What a person sees in the terminal: progress, results, errors in one sentence."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headprobe.errors import HeadprobeError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from headprobe.doctor import Examination
    from headprobe.report import Tables

Item = TypeVar("Item")

_OUT_OF_MEMORY = (
    "out of memory: run fewer texts at a time (--batch-size), shorter ones (--max-tokens), or a "
    "smaller precision (--dtype)."
)

_PIPED_WIDTH = 200
"""Columns where no terminal has a width of its own: in a file, lines need no fitting."""


@contextmanager
def plain_errors(*, debug: bool) -> Iterator[None]:
    """Turn what went wrong into one sentence and exit code 1; with `debug`, show the traceback."""
    try:
        with _stopped_like_ctrl_c():
            yield
    except click.ClickException:  # says what it has to say in its own way
        raise
    except KeyboardInterrupt:
        raise click.ClickException("stopped; nothing was written.") from None
    except Exception as error:
        if debug:
            raise
        raise click.ClickException(_sentence(error)) from error


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """A process that is told to end clears away what is unfinished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(items: Sequence[Item], label: str) -> Iterator[Iterable[Item]]:
    """The items, with a bar and the time left on standard error while they are iterated over.

    The bar is gone when the block ends, also by an exception; without a terminal there is none.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar.track(items, description=escape(label))


def results(tables: Tables, folder: Path) -> None:
    """Print a line per layer, the verdict, and what was written."""
    console = _console()
    console.print(_layers(tables))
    console.print(f"\n{tables.summary['verdict']}")
    left_out = {left["site"]: left["reason"] for left in tables.summary["left_out"]}
    for line in _by_reason(left_out):
        console.print(f"Left out: {line}.")
    for note in tables.summary.get("notes", []):
        console.print(f"Note: {note}.")
    console.print(
        f"Layers and heads count from 0; means over the heads of a layer{_units(tables)}."
    )
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    console.print(f"\nWritten to {click.format_filename(folder)}: {names}", soft_wrap=True)


def examination(found: Examination, name: str) -> None:
    """Print a line per attention call, what is wrong, and a verdict."""
    console = _console()
    rows = found.table()
    if len(rows):
        console.print(_calls(rows))
        console.print()
    without = {site: found.profile.left_out[site] for site in found.without_softmax}
    for line in _by_reason(without):
        console.print(f"No weights to look at: {line}.")
    for before, instead in found.profile.switched.items():
        console.print(f"Switched while it was watched: attention in {before} ran as {instead}.")
    if found.padding_difference is not None:
        moved = f"moves the output of a text by {found.padding_difference:.1e} of its largest entry"
        console.print(f"Padding {moved}.")
    for problem in found.problems:
        console.print(f"Wrong: {problem}.")
    worst = rows["reconstruction_error"].max() if len(rows) else math.nan
    console.print(
        f"{name}: {len(rows)} attention calls captured; weights times values are within "
        f"{worst:.1e} of what the model computed; {len(found.problems)} problems."
    )
    console.print("Layers and heads count from 0; errors are relative to the largest entry.")


def _by_reason(left_out: Mapping[str, str]) -> list[str]:
    """A line per reason, with the modules that it holds for."""
    sites: dict[str, list[str]] = {}
    for site, reason in left_out.items():
        sites.setdefault(reason, []).append(site or "the model")
    more = {
        reason: f" and {len(some) - _FEW} more" for reason, some in sites.items() if some[_FEW:]
    }
    return [
        f"{', '.join(some[:_FEW])}{more.get(reason, '')}: {reason}"
        for reason, some in sites.items()
    ]


_FEW = 3


def _calls(rows: pd.DataFrame) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in _CALL_COLUMNS:
        table.add_column(title, overflow="fold")
    for row in rows.to_dict("records"):
        low, high = row["row_sum_low"], row["row_sum_high"]
        shared = "" if row["heads"] == row["kv_heads"] else f" ({row['kv_heads']} kv)"
        dims = {row["query_dim"], row["value_dim"]} - {None}
        table.add_row(
            row["site"] or "(the model)",
            f"{row['stack']} {row['kind']} {row['layer']}".strip(),
            f"{row['heads']}{shared}",
            "/".join(f"{dim:.0f}" for dim in sorted(d for d in dims if d == d)),
            row["captured_at"],
            f"{low:.3f}" if high - low < _ROUNDING else f"{low:.3f} to {high:.3f}",
            "" if row["padding_mass"] is None else _tiny(row["padding_mass"]),
            _tiny(row["reconstruction_error"]),
            "yes" if row["ablation"] else "no",
            row["pruning"],
        )
    return table


_CALL_COLUMNS = (
    *("module", "layer", "heads", "dim", "captured at", "rows sum to", "on padding", "error"),
    *("ablate", "prune"),
)
_ROUNDING = 5e-4


def _tiny(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.0e}" if value else "0"


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def _units(tables: Tables) -> str:
    """The unit of the distances, where it is not tokens alone."""
    units = sorted(set(tables.heads["distance_unit"]) - {""})
    return f"; distances in {' or '.join(units)}" if units not in ([], ["tokens"]) else ""


def _layers(tables: Tables) -> Table:
    from rich.table import Table

    streams = tables.layers[["kind", "stack"]].drop_duplicates()
    table = Table(box=None, pad_edge=False, header_style="bold")
    # On a narrow terminal cells are folded; an ellipsis would hide heads and digits.
    table.add_column("layer", justify="right", overflow="fold")
    for name in ("heads", "entropy / max", "distance", "JS similarity"):
        table.add_column(name, justify="right", overflow="fold", min_width=5)
    table.add_column("similar heads", overflow="fold")
    for row in tables.layers.to_dict("records"):
        table.add_row(
            f"{row['stack']} {row['kind']} {row['layer']}".strip()
            if len(streams) > 1
            else str(row["layer"]),
            str(row["heads"]),
            _number(row["entropy_normalized_mean"], 3),
            _number(
                row["distance_mean"], 3 if tables.heads["distance_unit"].eq("seconds").any() else 1
            ),
            _number(row["js_similarity_mean"], 3),
            "  ".join(_groups(tables, row)),
        )
    return table


def _groups(tables: Tables, layer: dict[Any, Any]) -> list[str]:
    """The groups of similar heads in a layer, like "3+5"."""
    groups = tables.groups
    for name in ("kind", "stack", "layer"):
        groups = groups[groups[name] == layer[name]]
    return [heads.replace(";", "+") for heads in groups["heads"]]


def _number(value: float, digits: int) -> str:
    return "" if value != value else f"{value:.{digits}f}"  # NaN: not measured


def _sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    # torch names memory that ran out in its messages: as a RuntimeError, too, on the CPU.
    says_memory = "out of memory" in text.lower() or "not enough memory" in text.lower()
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_memory):
        return _OUT_OF_MEMORY
    if isinstance(error, HeadprobeError | ValueError):
        return text
    kind = type(error).__name__
    if isinstance(error, OSError | RuntimeError):
        return f"the run failed ({kind}; --debug shows where): {text}"
    return f"headprobe failed ({kind}: {text}): a bug, please report it with what --debug shows."
