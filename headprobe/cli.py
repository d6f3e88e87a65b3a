"""The command `headprobe`. Heavy imports are inside the commands, so that --help is instant."""

from __future__ import annotations

import math
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headprobe import __version__
from headprobe.terminal import plain_errors, progress, results

if TYPE_CHECKING:
    from headprobe.report import Tables


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="headprobe")
def main() -> None:
    """What does each attention head of a transformer do, and which ones are redundant?"""


def _a_number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # a range lets it pass: it is neither below nor above
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


@main.command()
@click.argument("model", required=False)
@click.option("--text", metavar="FILE", help="Texts, one a line; - is standard input.")
@click.option("--paragraphs", is_flag=True, help="Texts in FILE are separated by blank lines.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder [reports/<model's name>].")
@click.option("--max-texts", type=click.IntRange(1), help="Use only the first N texts.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, help="Cut texts after N tokens.")
@click.option("--batch-size", type=click.IntRange(1), default=16, help="Texts run at a time.")
@click.option("--device", default="cpu", help="Where the model runs: cpu, cuda, cuda:1, mps.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Precision of the model; auto is as stored.",
)
@click.option(
    "--similarity",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    callback=_a_number,
    help="Heads of a layer form a group from this average Jensen-Shannon similarity on.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, help="Of the sampled rows and the intervals."
)
@click.option("--all-rows", is_flag=True, help="Compare heads on all rows, not on a sample.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--force", is_flag=True, help="Replace a folder that holds other files.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--open", "open_page", is_flag=True, help="Open the report when it is done.")
def analyze(**options: Any) -> None:  # noqa: ANN401
    """Measure every attention head of MODEL and write a report.

    MODEL is a name on the hub or a folder; without it, the embedded default model is used.

    \b
    headprobe analyze
    headprobe analyze bert-base-uncased --text corpus.txt --out reports/mine
    """  # noqa: D301 - click must see a backspace to keep the lines apart
    if options["paragraphs"] and options["text"] is None:
        raise click.UsageError("--paragraphs says how a file is split: name one with --text.")
    with plain_errors(debug=options["debug"]):
        folder, tables = _analyze(options)
    results(tables, folder)
    if options["open_page"]:
        click.launch(str(folder / "report.html"))


def _analyze(options: dict[str, Any]) -> tuple[Path, Tables]:
    """Load, measure, and write the files of a run."""
    from headprobe.analysis import Settings, analyze, run_inputs
    from headprobe.inputs import batch_texts, load_model, read_texts, sample_texts
    from headprobe.report import run_folder, write

    texts = (
        sample_texts()
        if options["text"] is None
        else read_texts(options["text"], paragraphs=options["paragraphs"])
    )
    names = ("device", "dtype", "trust_remote_code")
    source = load_model(options["model"], **{name: options[name] for name in names})
    batches = batch_texts(
        texts[: options["max_texts"]],
        source,
        max_tokens=options["max_tokens"],
        batch_size=options["batch_size"],
    )
    settings = Settings(options["similarity"], options["seed"], options["all_rows"])
    folder = options["out"] or Path("reports") / source.name
    started = datetime.now(UTC)
    with run_folder(folder, force=options["force"]) as unfinished:
        inputs = run_inputs(source, batches)
        with progress(inputs, f"{source.name}: {batches.texts} texts") as shown:
            measured, tables = analyze(source, batches, settings, shown)
        tables.summary["command"] = shlex.join(["headprobe", *sys.argv[1:]])
        tables.summary["started"] = started.isoformat(timespec="seconds")
        tables.summary["seconds"] = round((datetime.now(UTC) - started).total_seconds(), 1)
        measured.save(unfinished / "profile.safetensors")
        write(tables, unfinished)
    return folder, tables
