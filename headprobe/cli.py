"""The command `headprobe`. Heavy imports are inside the commands, so that --help is instant."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headprobe import __version__
from headprobe.terminal import examination, plain_errors, progress, results

if TYPE_CHECKING:
    from headprobe.inputs import Source, TextBatches
    from headprobe.report import Tables

_PARTS = ("revision", "gguf", "tokenizer", "base")
"""Options that name what a model is put together from, besides MODEL."""

Command = TypeVar("Command", bound=Callable[..., None])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="headprobe")
def main() -> None:
    """What does each attention head of a transformer do, and which ones are redundant?"""


def _a_number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # a range lets it pass: it is neither below nor above
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


def _which_model(command: Command) -> Command:
    """What tells a model and how it is loaded."""
    options = (
        click.argument("model", required=False),
        click.option(
            "--module",
            metavar="FILE:FUNCTION",
            help="A Python file whose function returns (model, batches); no MODEL then.",
        ),
        click.option(
            "--revision", help="Branch, tag or commit of MODEL on the hub [its main branch]."
        ),
        click.option("--gguf", metavar="FILE", help="A GGUF file in MODEL, a folder or hub name."),
        click.option(
            "--tokenizer", metavar="NAME", help="A folder or hub name to take the tokenizer from."
        ),
        click.option(
            "--base", metavar="NAME", help="The base of MODEL, an adapter, if not the one it names."
        ),
        click.option("--text", metavar="FILE", help="Texts, one a line; - is standard input."),
        click.option(
            "--images",
            metavar="PATH",
            multiple=True,
            help="An image file or a folder of images, for a model that reads images; repeatable.",
        ),
        click.option(
            "--audio",
            metavar="PATH",
            multiple=True,
            help="A WAV file or a folder of them, for a model that hears; repeatable.",
        ),
        click.option(
            "--device",
            default="cpu",
            help="Where the model runs: cpu, cuda, cuda:1, mps; auto is a GPU if there is one.",
        ),
        click.option(
            "--device-map",
            type=click.Choice(["auto", "balanced", "sequential"]),
            help="Spread the model over devices, and over the disk where they are too small.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            help="Precision of the model; auto is as stored.",
        ),
        click.option(
            "--trust-remote-code", is_flag=True, help="Run code that comes with the model."
        ),
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
    )
    return reduce(lambda decorated, option: option(decorated), reversed(options), command)


@main.command()
@_which_model
@click.option("--paragraphs", is_flag=True, help="Texts in FILE are separated by blank lines.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder [reports/<model's name>].")
@click.option(
    "--max-texts", type=click.IntRange(1), help="Use only the first N texts, images or sounds."
)
@click.option("--max-tokens", type=click.IntRange(1), default=128, help="Cut texts after N tokens.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=16,
    help="Texts, images or sounds run at a time.",
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
@click.option("--force", is_flag=True, help="Replace a folder that holds other files.")
@click.option("--open", "open_page", is_flag=True, help="Open the report when it is done.")
def analyze(**options: Any) -> None:  # noqa: ANN401
    """Measure every attention head of MODEL and write a report.

    MODEL is a name on the hub, a folder (also of an adapter) or a GGUF file; without it, the
    embedded default model is used.

    \b
    headprobe analyze
    headprobe analyze bert-base-uncased --text corpus.txt --out reports/mine
    headprobe analyze --module mine.py:build
    """  # noqa: D301 - click must see a backspace to keep the lines apart
    if options["paragraphs"] and options["text"] is None:
        raise click.UsageError("--paragraphs says how a file is split: name one with --text.")
    with plain_errors(debug=options["debug"]):
        folder, tables = _analyze(options)
    results(tables, folder)
    if options["open_page"]:
        click.launch(str(folder / "report.html"))


@main.command()
@_which_model
def doctor(**options: Any) -> None:  # noqa: ANN401
    """Check on one small batch what can be seen, and done, in MODEL.

    A line for every module that attends, with how far its map is from what the model computed, and
    what could not be read, with the reason. Exit code 1 if anything is wrong.
    """
    with plain_errors(debug=options["debug"]):
        from headprobe.doctor import examine

        source, batches = _inputs(options, small=True)
        found = examine(source.model, batches.batches[0], batch_first=batches.batch_first)
    examination(found, source.name)
    if found.problems:
        sys.exit(1)


def _inputs(options: dict[str, Any], *, small: bool = False) -> tuple[Source, TextBatches]:
    """The model and the batches that a command names; one batch of short texts if `small`."""
    from headprobe.inputs import (
        Choice,
        Parts,
        batch_inputs,
        build_module,
        load_model,
        read_images,
        read_sounds,
        read_texts,
    )

    if options["module"]:
        media = ("text", "images", "audio")
        others = [options[name] for name in ("model", "device_map", *media, *_PARTS)]
        if any(others) or options["device"] != "cpu":
            raise click.UsageError("--module makes model and batches itself: leave the others out.")
        return build_module(options["module"])
    if options["device_map"] and options["device"] != "cpu":
        raise click.UsageError("--device-map says where the model runs: leave --device out.")
    text, paragraphs = options["text"], options.get("paragraphs", False)
    choice = Choice(  # read first: a path that is wrong is told before a large model is loaded
        texts=None if text is None else read_texts(text, paragraphs=paragraphs),
        images=read_images(options["images"]),
        sounds=read_sounds(options["audio"]),
        most=options.get("max_texts"),
        small=small,
    )
    names = ("device", "device_map", "dtype", "trust_remote_code")
    parts = Parts(options["model"], **{name: options[name] for name in _PARTS})
    source = load_model(parts, **{name: options[name] for name in names})
    if small:
        return source, batch_inputs(source, choice)
    sizes = {name: options[name] for name in ("max_tokens", "batch_size")}
    return source, batch_inputs(source, choice, **sizes)


def _analyze(options: dict[str, Any]) -> tuple[Path, Tables]:
    """Load, measure, and write the files of a run."""
    from headprobe.analysis import Settings, analyze, run_inputs
    from headprobe.report import run_folder, write

    source, batches = _inputs(options)
    settings = Settings(options["similarity"], options["seed"], options["all_rows"])
    folder = options["out"] or Path("reports") / source.name
    started = datetime.now(UTC)
    with run_folder(folder, force=options["force"]) as unfinished:
        inputs = run_inputs(source, batches)
        with progress(inputs, f"{source.name}: {batches.counted}") as shown:
            measured, tables = analyze(source, batches, settings, shown)
        tables.summary["command"] = shlex.join(["headprobe", *sys.argv[1:]])
        tables.summary["started"] = started.isoformat(timespec="seconds")
        tables.summary["seconds"] = round((datetime.now(UTC) - started).total_seconds(), 1)
        measured.save(unfinished / "profile.safetensors")
        write(tables, unfinished)
    return folder, tables
