"""Writes the files of a run."""

from pathlib import Path

from headprobe.report.formatting import csv_text, json_text
from headprobe.report.page import page
from headprobe.report.tables import Tables


def write(tables: Tables, folder: Path) -> list[Path]:
    """Write report.html, the CSV tables and summary.json into an existing folder.

    The page and the CSV tables depend on the tables alone: the same tables give the same bytes.

    Args:
        tables: The results.
        folder: An existing folder; files of these names in it are replaced.

    Returns:
        The files written. summary.json is the last: a folder that has it is complete.
    """
    contents = {
        "report.html": page(tables),
        "heads.csv": csv_text(tables.heads),
        "similarity.csv": csv_text(tables.similarity),
        "layers.csv": csv_text(tables.layers),
        "intervals.csv": csv_text(tables.intervals),
        "summary.json": json_text({**tables.summary, "tool": "headprobe"}),
    }
    for name, text in contents.items():
        # A path that isn't valid Unicode may reach us as lone surrogates; show them escaped.
        (folder / name).write_bytes(text.encode("utf-8", errors="backslashreplace"))
    return [folder / name for name in contents]
