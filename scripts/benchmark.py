"""What an analysis costs over the plain forward pass of the same model.

    python scripts/benchmark.py

Runs a model of BERT-base's shape with random weights (no download) on random tokens: plain, under
`Capture` alone, and under `headprobe.profile` within layers and with pairs across layers. Runs are
interleaved, and what is printed is the median of the ratios to the plain run of the same round,
with the smallest and the largest. Takes about 10 minutes on two cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
from transformers import BertConfig, BertModel

import headprobe

SHAPES = ((128, 16), (512, 4), (2048, 1))
"""Tokens of a text, and texts of a batch."""


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def variants(model: BertModel, batch: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Name -> what is run."""
    classes = {"special": [0, 1], "punctuation": list(range(2, 30))}
    within = headprobe.Sampling(pairs=0)  # pairs within a layer are always compared
    across = headprobe.Sampling(rows_across=max(1, 512 // len(batch["input_ids"])))

    def captured() -> None:
        with headprobe.Capture(model, lambda call: None):
            model(**batch)

    def profiled(sampling: headprobe.Sampling) -> Callable[[], object]:
        return lambda: headprobe.profile(model, [batch], sampling=sampling, token_classes=classes)

    return {
        "plain": lambda: model(**batch),
        "capture alone": captured,
        "all statistics, pairs within layers": profiled(within),
        "and pairs across layers": profiled(across),
    }


def ratios(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Name -> the ratio to the plain run, round by round."""
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        seconds = {name: timed(run) for name, run in runs.items()}
        for name, taken in seconds.items():
            found[name].append(taken / seconds["plain"])
    return found


@click.command()
@click.option("--rounds", default=5, help="Interleaved runs.")
@click.option("--layers", default=12, help="Layers of the model.")
@click.option("--threads", default=2, help="Threads of torch.")
@click.option("--shape", "shapes", type=(int, int), multiple=True, default=SHAPES)
def main(rounds: int, layers: int, threads: int, shapes: tuple[tuple[int, int], ...]) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, max_position_embeddings=max(s for s, _ in shapes))
    config._attn_implementation = "sdpa"
    model = BertModel(config).eval()
    with torch.no_grad():
        for length, texts in shapes:
            ids = torch.randint(0, config.vocab_size, (texts, length))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            click.echo(f"{length} tokens x {texts} texts, {layers} layers, {threads} threads")
            for name, found in ratios(variants(model, batch), rounds).items():
                median = statistics.median(found)
                click.echo(f"  {median:5.2f}  ({min(found):.2f} to {max(found):.2f})  {name}")


if __name__ == "__main__":
    main()
