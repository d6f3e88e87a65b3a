"""The README is true: its commands run, its tables are complete, its output is what is printed."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import headprobe
from headprobe import cli
from headprobe.statistics import LAYER_STATISTICS, MEASURES, STATISTICS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


SHELL = [line for block in blocks("sh") for line in block.splitlines()]
ANALYZE = [line for line in SHELL if line.startswith("headprobe ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what a fresh clone has that the commands read."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "README.md").write_text(README, encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", ANALYZE)
def test_a_command_of_the_readme_runs(command, folder):
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (folder / printed_folder(done.stdout) / "report.html").exists()
    if command == "headprobe analyze":
        (shown,) = [block for block in blocks("text") if "Written to" in block]
        assert_same_output(shown, done.stdout)


def printed_folder(output):
    return re.search(r"Written to (\S+):", output).group(1)


def assert_same_output(shown, printed):
    """The same words; numbers to 1 %, since another processor rounds otherwise."""
    for expected, got in zip(shown.split(), printed.split(), strict=True):
        try:
            assert float(got) == pytest.approx(float(expected), rel=0.01)
        except ValueError:
            assert got == expected


def test_the_other_commands_of_the_readme_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    others = [line for line in SHELL if line not in ANALYZE]
    made = [line.removeprefix("make ") for line in others if line.startswith("make ")]
    assert made == ["report", "test"]
    assert set(made) <= set(targets)
    # The rest is how a virtual environment is made, which `make` has just done for this run.
    assert [line for line in others if not line.startswith("make ")] == [
        "python3 -m venv .venv && . .venv/bin/activate",
        'pip install -c constraints.txt ".[demo]"',
    ]


@pytest.mark.parametrize("block", blocks("python"))
def test_the_python_of_the_readme_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "def build()" in block:
        (tmp_path / "mine.py").write_text(block)
        assert "`headprobe analyze --module mine.py:build`" in README
        cli.main(["analyze", "--module", "mine.py:build"], standalone_mode=False)
    else:
        exec(compile(block, "README.md", "exec"), {})
    assert "heads" in capsys.readouterr().out


def options():
    return [
        (name, max(option.opts, key=len))
        for name, command in cli.main.commands.items()
        for option in command.params
        if isinstance(option, click.Option)
    ]


@pytest.mark.parametrize(("command", "option"), options())
def test_every_option_is_in_the_readme(command, option):
    assert f"headprobe {command}" in README
    assert f"| `{option}" in README


def test_every_option_has_help():
    for command in cli.main.commands.values():
        assert command.help
        assert all(p.help for p in command.params if isinstance(p, click.Option))


@pytest.mark.parametrize("name", [s.name for s in (*STATISTICS, *LAYER_STATISTICS)])
def test_every_statistic_is_in_the_readme(name):
    assert f"`{name}`" in README


@pytest.mark.parametrize("name", [*headprobe.__all__, *MEASURES])
def test_every_public_name_and_measure_is_in_the_readme(name):
    assert re.search(rf"`{name}\b", README)


@pytest.mark.parametrize("name", headprobe.__all__)
def test_every_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(headprobe, name))


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_project_speaks_of_itself_alone():
    """No path of somebody's machine, and no host of a package index, in any tracked text file."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    forbidden = re.compile(
        "|".join(["/wor" + "k/", "pypi" + r"\.org", "/ro" + "ot/", "share" + "d/"])
    )
    for name in tracked.split():
        path = ROOT / name
        if path.suffix in (".png", ".wav", ".safetensors") or not path.is_file():
            continue
        assert not forbidden.search(path.read_text(encoding="utf-8")), name
