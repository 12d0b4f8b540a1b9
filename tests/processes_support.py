"""Trials of several processes as their users start them, and what came out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_trial import tiny_overrides

from attnres.compose import compose_trial
from attnres.data.corpus import open_corpus
from attnres.metrics import METRICS_FILE, read_rows
from attnres.record import read_record
from attnres.trial import Trial, resolve

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
# Steps that last long enough to be stopped between them, and checkpoints that a kill may rely on.
SLOW = ("model.depth=6", "model.width=96", "model.mlp_width=256", "model.batch_size=8", "model.context=64")


def overrides_for(root: Path, name: str, *more: str, steps: int = STEPS) -> list[str]:
    """A trial with a row for every step; trials of other names are the same trial in another folder."""
    often = ("runtime.log_every_steps=1", "optim.learning_rate=0.005", f"runs_dir={root / name}")
    # A step of the tiny trial is 4 sequences of 32 tokens, one of a slow trial 8 of 64.
    return tiny_overrides(root, *often, *more, steps=steps * 4 if set(SLOW) <= set(more) else steps)


def the_trial(overrides: list[str]) -> Trial:
    config = compose_trial(overrides)
    return resolve(config, open_corpus(config.data, config.model.context))


def start(overrides: list[str], **options: Any) -> subprocess.Popen[str]:
    """`python -m attnres.train` in a process group of its own, as a launcher starts it."""
    command = [sys.executable, "-m", "attnres.train", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, **{**pipes, **options}
    )


def run(overrides: list[str], code: int = 0) -> str:
    """Run to the end; the exit code has to be `code`. Returns what was printed."""
    process = start(overrides)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said


def stop_at(overrides: list[str], row: int, number: signal.Signals = signal.SIGTERM) -> str:
    """Send a signal once the metrics have so many rows; returns what was printed. It has to end stopped."""
    folder = the_trial(overrides).folder
    process = start(overrides)
    wait_for_rows(folder, row, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else 143), said
    return said


def wait_for_rows(folder: Path, rows: int, process: subprocess.Popen[str]) -> None:
    file = folder / METRICS_FILE
    wait_until(
        lambda: process.poll() is not None or (file.exists() and file.read_bytes().count(b"\n") >= rows)
    )
    assert process.poll() is None, process.communicate()[0]


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def rows(overrides: list[str]) -> list[dict[str, Any]]:
    return read_rows(the_trial(overrides).folder / METRICS_FILE)


def record(overrides: list[str]) -> dict[str, Any]:
    return read_record(the_trial(overrides).folder / "record.json")


def largest_difference(one: list[str], other: list[str], key: str = "loss_nats") -> float:
    """Of training and evaluation rows alike, which have to be of the same steps."""
    mine, theirs = rows(one), rows(other)
    assert [(r["kind"], r["step"]) for r in mine] == [(r["kind"], r["step"]) for r in theirs]
    return max(abs(a[key] - b[key]) for a, b in zip(mine, theirs, strict=True) if key in a)


def descendants(pid: int) -> dict[int, str]:
    """Living processes below `pid`, with their command lines."""
    found: dict[int, str] = {}
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "stat").read_text().rpartition(")")[2].split()
            found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parents.setdefault(int(words[1]), []).append(int(path.name))
    below, pending = {}, [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        below |= {child: found[child] for child in children}
        pending += children
    return below


def workers(pid: int) -> list[int]:
    """The processes of a trial, in the order of their ranks."""
    return sorted(child for child, words in descendants(pid).items() if "attnres.distributed.worker" in words)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
