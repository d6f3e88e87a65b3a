"""A small hub on this machine: it answers the HTTP calls of the real client, well or badly."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

WEIGHTS = "model.safetensors"


@dataclass
class Repo:
    """A model on the hub.

    Attributes:
        revisions: the folder of each branch and tag.
        trouble: what is wrong with it now: "gated", "private", "forbidden", "down";
            "cut once", "cut", "damaged" for the weights; "damaged config".
    """

    revisions: dict[str, Path]
    trouble: str = ""

    def commit(self, revision: str) -> str | None:
        commits = {name: digest(name.encode()) for name in self.revisions}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def folder(self, commit: str) -> Path:
        return next(self.revisions[name] for name in self.revisions if self.commit(name) == commit)


@dataclass
class Hub:
    """All models by name, and a log of what was asked of the hub."""

    address: str
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, Message]] = field(default_factory=list)

    def asked(self, part: str) -> list[str]:
        """Paths of the requests so far that contain this."""
        return [path for _, path, _ in self.requests if part in path]


def digest(content: bytes) -> str:
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_stored_large(file: str) -> bool:
    return file.endswith(".safetensors")


def entry(path: Path) -> dict:
    """A file in the listing of a commit."""
    content = path.read_bytes()
    found = {"type": "file", "path": path.name, "size": len(content), "oid": digest(content)}
    large = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
    return {**found, "lfs": large} if is_stored_large(path.name) else found


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without models, on a free port, as long as the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        self.server.hub.requests.append((self.command, path, self.headers))
        api = path.startswith("/api/models/")
        name, _, rest = path.removeprefix("/api/models" if api else "").partition(
            "/revision/" if "/revision/" in path else "/tree/" if api else "/resolve/"
        )
        repo = self.server.hub.repos.get(name.removeprefix("/"))
        if repo is None or repo.trouble == "private":
            self.reply(401, error="RepoNotFound")
        elif repo.trouble == "down":
            self.reply(500)
        elif repo.trouble == "forbidden":
            self.reply(403, {"X-Error-Message": "Your token may not read this."})
        else:
            revision, _, file = rest.partition("/")
            self.answer(repo, revision or "main", file, api)

    do_HEAD = do_GET

    def answer(self, repo: Repo, revision: str, file: str, api: bool) -> None:
        commit = repo.commit(revision)
        if commit is None:
            return self.reply(404, error="RevisionNotFound")
        folder = repo.folder(commit)
        if api:
            model = {"id": "me/tiny", "sha": commit, "siblings": []}
            files = [entry(path) for path in folder.iterdir()] if not file else []
            return self.reply(200, body=json.dumps(files if "/tree/" in self.path else model))
        if repo.trouble == "gated":
            return self.reply(401, error="GatedRepo")
        if not (folder / file).is_file():
            return self.reply(404, {"X-Repo-Commit": commit}, error="EntryNotFound")
        return self.send(repo, (folder / file).read_bytes(), commit, file)

    def send(self, repo: Repo, content: bytes, commit: str, file: str) -> None:
        """A file; large ones are named by their SHA-256, others as git does."""
        is_large = is_stored_large(file)
        etag = sha256(content) if is_large else digest(content)
        damaged = {"damaged": WEIGHTS, "damaged config": "config.json"}
        if damaged.get(repo.trouble) == file:
            content = content[:-8] + bytes(byte ^ 1 for byte in content[-8:])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        headers["Content-Length"] = str(len(content))
        if self.command == "GET" and is_large and repo.trouble.startswith("cut"):
            content = content[: len(content) // 2]
            repo.trouble = repo.trouble.removesuffix("cut once")
        self.reply(200, headers, body=content)

    def reply(
        self, status: int, headers: dict | None = None, body: str | bytes = b"", error: str = ""
    ) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        extra = {"X-Error-Code": error} if error else {}
        for key, value in {"Content-Length": str(len(content)), **extra, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Nothing on standard error; the log is `Hub.requests`."""
