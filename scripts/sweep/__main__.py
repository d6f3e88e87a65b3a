"""Every model type of the installed transformers: is what headprobe captures what the model used?

Each type is built tiny from its config (nothing is downloaded) and run with sdpa and with the
eager attention. What `Capture` sees is compared with the maps that the model itself gives, and
weights times values with what the model computed.

Command:  python -m scripts.sweep [--types bert,llama] [--sample 20 --seed 1] [--workers 2]
Input:    the installed transformers
Output:   reports/coverage.csv (a row per type and implementation), and a summary on the screen
Time:     5 to 15 minutes on two cores; a type that takes more than 60 s is given up
"""

import argparse
import csv
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from scripts.sweep.build import model_types
from scripts.sweep.judge import COLUMNS, Row
from scripts.sweep.pool import judge_all

# In this order: a type that attends in two ways has the later of its verdicts.
VERDICTS = {
    "not built": "no tiny model could be made from the config",
    "not run": "no inputs were found that the tiny model runs on",
    "no attention": "no softmax over queries times keys",
    "captured": "every map is the model's own",
    "left out partly": "every map shown is the model's own; other modules are named",
    "refused": "with the reason",
    "raised": "an error in headprobe",
    "WRONG": "a map was shown that is not the model's own",
}


def main(arguments: list[str]) -> int:
    """Judge the types, write the table, print the summary; 1 if anything is wrong."""
    options = _options(arguments)
    known = model_types()
    kinds = options.types.split(",") if options.types else list(known)
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        sys.exit(f"no model type of transformers {transformers.__version__}: {', '.join(unknown)}")
    if options.sample:
        kinds = sorted(random.Random(options.seed).sample(kinds, min(options.sample, len(kinds))))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for number, (kind, found) in enumerate(judge_all(kinds, options.workers), 1):
            writer.writerows(row.cells() for row in found)
            file.flush()
            rows += found
            verdicts = ", ".join(dict.fromkeys(row.verdict for row in found))
            print(f"{number}/{len(kinds)} {kind}: {verdicts}", file=sys.stderr)
    _write_in_order(rows, options.out)
    print(summary(rows))
    return int(any(row.verdict in ("WRONG", "raised") for row in rows))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m scripts.sweep", description=__doc__.split("\n")[0])
    parser.add_argument("--types", help="only these, separated by commas")
    parser.add_argument("--sample", type=int, help="only so many types, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("reports/coverage.csv"))
    return parser.parse_args(arguments)


def _write_in_order(rows: Iterable[Row], path: Path) -> None:
    order = ("", "sdpa", "eager")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: (row.type, order.index(row.attention))):
            writer.writerow(row.cells())


def summary(rows: Iterable[Row]) -> str:
    """A Markdown table: how many types have which verdict, and the share that is captured."""
    order = list(VERDICTS)
    of_types: dict[str, str] = {}
    for row in rows:
        of_types[row.type] = max(of_types.get(row.type, order[0]), row.verdict, key=order.index)
    counts = Counter(of_types.values())
    attending = sum(counts[verdict] for verdict in order[order.index("captured") :])
    share = f"{counts['captured'] / attending:.1%}" if attending else "none"
    return "\n".join(
        (
            *("| verdict | model types | |", "|---|---|---|"),
            *(f"| {verdict} | {counts[verdict]} | {VERDICTS[verdict]} |" for verdict in order),
            f"\nCaptured of the {attending} that run and attend: {share}",
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
