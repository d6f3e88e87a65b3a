"""Judges each model type in a process of its own, so that a crash or a hang costs one row."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from scripts.sweep.build import model_types
from scripts.sweep.judge import Row, judge

SECONDS = 60
BYTES = 12 * 2**30

# A fork starts with torch and transformers loaded, which takes seconds otherwise.
_FORK = multiprocessing.get_context("fork")


def judge_all(kinds: Sequence[str], workers: int) -> Iterator[tuple[str, list[Row]]]:
    """Each type and its rows, as they come."""
    waiting = list(reversed(kinds))
    running: dict[Connection, _Job] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            job = _Job(waiting.pop())
            running[job.end] = job
        for end in wait(list(running), timeout=1):
            job = running[end]
            if job.read():
                del running[end]
                yield job.kind, job.rows
        for end, job in list(running.items()):
            if time.monotonic() > job.deadline:
                job.process.kill()
                job.rows.append(_failed(job.kind, f"took more than {SECONDS} s"))
                job.close()
                del running[end]
                yield job.kind, job.rows


@dataclass
class _Job:
    """A type that is being judged."""

    kind: str
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end, other = _FORK.Pipe(duplex=False)
        self.process: BaseProcess = _FORK.Process(target=_work, args=(self.kind, other))
        self.deadline = time.monotonic() + SECONDS
        self.process.start()
        other.close()

    def read(self) -> bool:
        """Take a row; True when there are no more."""
        try:
            row = self.end.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode:
                reason = f"the process died with code {self.process.exitcode}"
                self.rows.append(_failed(self.kind, reason))
            self.close()
            return True
        self.rows.append(row)
        return False

    def close(self) -> None:
        """Give everything back."""
        self.process.join()
        self.end.close()


def _failed(kind: str, reason: str) -> Row:
    return Row(kind, model_types()[kind][0], "", verdict="not run", reason=reason)


def _work(kind: str, end: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for row in judge(kind):
        end.send(row)
    end.close()
