"""Models by name: the real client of the hub, against a hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from tests.hub import WEIGHTS, Hub, Repo, running_hub
from tests.tiny import save_bert

BERT = "bert-base-uncased"
TABLES = ("heads.csv", "similarity.csv", "layers.csv", "intervals.csv", "report.html")

SERVE = """
import json, sys
from click.testing import CliRunner
from headprobe.cli import main
for line in sys.stdin:
    result = CliRunner().invoke(main, json.loads(line))
    print(json.dumps([result.exit_code, result.stdout, result.stderr]), flush=True)
"""
"""Runs commands of headprobe, a line each: importing torch for every one would take minutes."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The branch main, and the tag v2 with other weights."""
    models = tmp_path_factory.mktemp("models")
    folders = {"main": save_bert(models / "main"), "v2": save_bert(models / "v2")}
    weights = load_file(folders["v2"] / WEIGHTS)
    torch.manual_seed(1)
    changed = {name: weight + torch.randn_like(weight) for name, weight in weights.items()}
    save_file(changed, folders["v2"] / WEIGHTS, metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder that commands run in, with texts; the client's cache lies in it, too."""
    place = tmp_path_factory.mktemp("place")
    (place / "few.txt").write_text("the cat sat on the mat .\nthe dog ran , the cat sat .\n")
    return place


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ours = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return {**kept, **ours, "HF_TOKEN": "hf_of_the_test", "no_proxy": "127.0.0.1", **more}


def arguments(model: str, out: str, *more: str) -> list[str]:
    return ["analyze", model, "--text", "few.txt", "--out", out, *more]


def start(place: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    """A run as a person starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "headprobe", *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@dataclass
class Client:
    """A process that runs commands one after the other, in `place`."""

    place: Path
    process: subprocess.Popen

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))

    def analyze(self, model: str, *more: str) -> dict:
        """The summary of a run that ends well, with nothing on standard error."""
        assert self.run(*arguments(model, "out", "--force", *more))[::2] == (0, "")
        return json.loads((self.place / "out" / "summary.json").read_text("utf-8"))

    def refusal(self, model: str, *more: str) -> str:
        """The one sentence that a run ends in; it leaves nothing behind."""
        code, output, errors = self.run(*arguments(model, "refused", *more))
        assert (code, output) == (1, "")
        assert errors.startswith("Error: ")
        assert errors.count("\n") == 1
        assert not [path for path in self.place.iterdir() if "refused" in path.name]
        return errors


@pytest.fixture(scope="module")
def client(hub, place, tmp_path_factory) -> Iterator[Client]:
    noise = tmp_path_factory.mktemp("noise") / "stderr"
    with (
        noise.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", SERVE],
            cwd=place,
            env=environment(hub.address, place / "home"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        yield Client(place, process)
        process.stdin.close()
        process.wait(timeout=30)
    assert noise.read_text("utf-8") == ""


@pytest.fixture
def put(hub, folders, request) -> Callable[[str], str]:
    """Puts a model on the hub, with some trouble, under a name of this test's own."""

    def put(trouble: str = "") -> str:
        name = f"me/{request.node.name.replace('[', '-').strip(']').replace(' ', '-')}"
        hub.repos[name] = Repo(folders, trouble)
        return name

    return put


# --- what works ---


def test_downloaded_once_then_offline(hub, folders, place):
    """The hub goes away after the first run; the second gives the same bytes."""
    home = place / "own home"
    with running_hub() as gone:
        gone.repos[BERT] = repo = Repo(folders)
        online = environment(gone.address, home)
        code, output, errors = start(place, online, *arguments(BERT, "online"))
        assert (code, errors) == (0, "")
        assert "Written to online" in output
        assert len([path for path in gone.asked(WEIGHTS) if "resolve" in path]) == 2
    offline = environment(gone.address, home, HF_HUB_OFFLINE="1")
    assert start(place, offline, *arguments(BERT, "offline"))[::2] == (0, "")
    for table in TABLES:
        first, second = ((place / run / table).read_bytes() for run in ("online", "offline"))
        assert first == second, table
    for run in ("online", "offline"):
        summary = json.loads((place / run / "summary.json").read_text("utf-8"))
        assert summary["model"]["revision"] == repo.commit("main")
        assert summary["model"]["name"] == BERT


def test_files_come_from_one_commit_with_the_token(hub, put, client):
    name, before = put(), len(hub.requests)
    client.analyze(name)
    asked = [(path, headers) for _, path, headers in hub.requests[before:] if name in path]
    assert {headers["Authorization"] for _, headers in asked} == {"Bearer hf_of_the_test"}
    by_branch = {path for path, _ in asked if "/main" in path}
    assert by_branch == {f"/{name}/resolve/main/config.json"}


def test_a_revision_is_another_model(hub, put, client):
    name = put()
    commit = hub.repos[name].commit
    first, second = client.analyze(name), client.analyze(name, "--revision", "v2")
    assert first["model"]["revision"] == commit("main")
    assert second["model"]["revision"] == commit("v2")
    assert first["model"]["fingerprint"] != second["model"]["fingerprint"]
    again = client.analyze(name, "--revision", commit("v2"))
    assert again["model"] == second["model"]


def test_what_is_cached_is_used_while_the_hub_is_down(hub, put, client):
    name = put()
    first = client.analyze(name)
    hub.repos[name].trouble = "down"
    assert client.analyze(name)["model"] == first["model"]


def test_shards_come_as_one_model(hub, folders, put, client, tmp_path):
    name = put()
    whole = client.analyze(name)
    save_bert(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    model = BertModel.from_pretrained(folders["main"])
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    hub.repos["me/shards"] = Repo({"main": tmp_path})
    assert client.analyze("me/shards")["model"]["fingerprint"] == whole["model"]["fingerprint"]


def test_a_download_that_breaks_off_is_tried_again(hub, put, client):
    name = put("cut once")
    client.analyze(name)
    assert hub.repos[name].trouble == ""
    gets = [path for method, path, _ in hub.requests if method == "GET" and name in path]
    assert len([path for path in gets if path.endswith(WEIGHTS)]) == 2


# --- what is refused ---

REFUSALS = {
    "gated": ["is gated", "accept its conditions", "hf auth login"],
    "private": ["no public hub model", "hf auth login", "HF_TOKEN"],
    "forbidden": ["the hub answers 403", "Your token may not read this", "hf auth login"],
    "down": ["the hub answers 500", "try again later"],
    "cut": ["the weights of", "did not come", "run again"],
    "damaged": [f"{WEIGHTS} came damaged", "removed from the cache", "run again"],
    "damaged config": ["config.json came damaged", "removed from the cache", "run again"],
}


@pytest.mark.parametrize("trouble", REFUSALS)
def test_a_refusal_says_what_to_do_and_the_next_run_works(trouble, hub, put, client):
    name = put(trouble)
    message = client.refusal(name)
    for part in REFUSALS[trouble]:
        assert part in message
    hub.repos[name].trouble = ""
    assert client.analyze(name)["model"]["revision"] == hub.repos[name].commit("main")


def test_a_hub_that_is_down_is_asked_once(hub, put, client):
    """The client's own way is to ask again for most of a minute."""
    name = put("down")
    client.refusal(name)
    assert len(hub.asked(name)) == 1


def test_a_part_of_a_model_in_the_cache_is_no_model(hub, put, client):
    name = put("cut")
    client.refusal(name)
    hub.repos[name].trouble = "down"
    message = client.refusal(name)
    assert "the hub answers 500" in message
    assert "not in the cache or not whole" in message


def test_unknown_model(client):
    assert "no folder and no public hub model 'me/nothing'" in client.refusal("me/nothing")


def test_unknown_revision(put, client):
    name = put()
    expected = f"model '{name}' has no revision 'v3': name a branch, a tag or a commit."
    assert expected in client.refusal(name, "--revision", "v3")


def test_a_model_without_config(hub, tmp_path, client):
    (tmp_path / "README.md").write_text("nothing")
    hub.repos["me/empty"] = Repo({"main": tmp_path})
    assert "is on the hub, without a config.json" in client.refusal("me/empty")


def test_weights_that_rot_in_the_cache_are_refused(hub, put, client):
    """Wrong bytes in a weight load without an error: only the hash tells."""
    name = put()
    client.analyze(name)
    cache = client.place / "home" / "hub" / f"models--{name.replace('/', '--')}"
    (weights,) = cache.glob(f"snapshots/*/{WEIGHTS}")
    content = weights.read_bytes()
    weights.resolve().write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{WEIGHTS} came damaged" in client.refusal(name)
    client.analyze(name)
    assert weights.read_bytes() == content


def test_a_folder_has_no_revision(folders, client):
    assert "only models on the hub have revisions" in client.refusal(
        str(folders["main"]), "--revision", "v2"
    )


def test_a_module_has_no_revision(client):
    code, _, errors = client.run("analyze", "--module", "mine.py:build", "--revision", "v2")
    assert code == 2
    assert "leave the others out" in errors


def test_no_hub_at_all(place):
    with running_hub() as gone:
        nowhere = environment(gone.address, place / "empty home")
    code, output, errors = start(place, nowhere, *arguments(BERT, "refused"))
    assert (code, output) == (1, "")
    assert f"model '{BERT}' is no folder, is not in the cache or not whole" in errors
    assert "Connection refused" in errors
    assert errors.count("\n") == 1
    assert not (place / "refused").exists()
