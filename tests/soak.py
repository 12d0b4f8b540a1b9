"""Train many tiny trials while processes are killed at random, and count what was lost.

    python tests/soak.py                          # 200 trials, about 15 minutes on two cores
    python tests/soak.py --trials 12 --seed 3 --json

A study of tiny trials (one size, two rules, many seeds; W&B offline) is launched twice: once undisturbed, and
once with SIGKILL at random moments to a trial, the process that trials are forked from, the launcher or a
wandb-core; a killed launcher is started again at once, or after its trials are gone. Counted at the end:

  lost          trials without a finished record, and records that were there once and went or changed
  duplicated    trials whose status knows of more attempts than their record: trained after they had finished
  mismatching   records that differ from those of the undisturbed launch in more than `timing`
  leftovers     processes that outlived the last launch by more than a minute
  tracebacks    of the launches: whatever is killed, they say it in a line

Exit code 0: all five are 0. The same seed draws the same kills; the moments depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_launch import Launch, Outcome, command_of, compare, run_undisturbed
from sweeps_support import Workplace, write

from attnres.record import RecordError, read_record
from attnres.status import read_status

STUDY = """
name: tiny
purpose: A study for a soak.
baseline: prenorm
sizes: [tiny_a]
rules: [prenorm, {{rule: attnres_block, num_blocks: 2}}]
seeds: {seeds}
overrides: [budget=tokens, budget.tokens=3840, tracking=wandb_offline]
"""
SETTINGS = ("runtime.checkpoint_seconds=0.1", "launch.workers=2")
VICTIMS = {"trial": 6, "wandb-core": 2, "launcher": 1, "fork server": 1}  # of ten kills
MEAN_SECONDS = 2.0  # between two kills
MOST_LAUNCHES = 400


@dataclass
class Counts:
    """What the soak did and what came of it."""

    trials: int = 0
    launches: int = 0
    kills: Counter[str] = field(default_factory=Counter)  # by victim
    attempts: int = 0  # of all trials
    lost: int = 0
    duplicated: int = 0
    mismatching: int = 0
    leftovers: int = 0
    tracebacks: int = 0
    seconds: float = 0.0
    undisturbed_seconds: float = 0.0
    names: list[str] = field(default_factory=list)  # of the trials that are counted as wrong

    @property
    def wrong(self) -> int:
        return self.lost + self.duplicated + self.mismatching + self.leftovers + self.tracebacks


class Records:
    """What the records said when they were first seen. Nothing may change or go afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first: dict[Path, str] = {}
        self.lost: set[Path] = set()

    def look(self) -> None:
        for path in self.folder.glob("*/record.json"):
            if path not in self.first and _status(path) == "finished":
                self.first[path] = path.read_text(encoding="utf-8")
        for path, text in self.first.items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                self.lost.add(path)


def _status(path: Path) -> str | None:
    try:
        return str(read_record(path)["status"])
    except RecordError:
        return None


def find(launch: Launch, victim: str) -> list[int]:
    """Process ids of a kind of victim among the launch's processes."""
    if victim == "launcher":
        return [launch.process.pid] if launch.process.poll() is None else []
    if victim == "fork server":
        return launch.fork_server()
    if victim == "trial":
        return launch.trials()
    return [pid for pid in launch.alive() if "wandb-core" in command_of(pid)]


def disturb(folder: Path, arguments: list[str], draw: random.Random, counts: Counts) -> Records:
    """Launch until nothing is left to do, with kills at random moments."""
    records = Records(folder / "runs" / "tiny")
    while True:
        counts.launches += 1
        if counts.launches > MOST_LAUNCHES:
            raise SystemExit(f"not done after {MOST_LAUNCHES} launches; see {folder / 'launch.log'}")
        launch = Launch(folder, arguments)
        while launch.process.poll() is None:
            _wait(launch, draw.expovariate(1 / MEAN_SECONDS))
            records.look()
            (victim,) = draw.choices(list(VICTIMS), list(VICTIMS.values()))
            if pids := find(launch, victim):
                os.kill(draw.choice(sorted(pids)), signal.SIGKILL)
                counts.kills[victim] += 1
        code = launch.process.wait()
        if code == 0:
            if not launch.gone():
                counts.leftovers += len(launch.alive())
            records.look()
            return records
        if draw.random() < 0.5:
            launch.gone()


def _wait(launch: Launch, seconds: float) -> None:
    end = time.monotonic() + seconds
    while launch.process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def count(folder: Path, undisturbed: Path, records: Records, counts: Counts) -> None:
    outcome = Outcome()
    compare(undisturbed, folder, outcome)
    wrong = list(outcome.differing)
    counts.mismatching = len(outcome.differing)
    counts.trials = outcome.compared
    counts.lost = len(records.lost) + outcome.compared - len(records.first)
    for path, text in records.first.items():
        status, record = read_status(path.parent), json.loads(text)
        attempts = status["attempts"] if status else 0
        counts.attempts += attempts
        if attempts > record["timing"]["attempts"]:
            counts.duplicated += 1
            wrong.append(record["name"])
    counts.tracebacks = (folder / "launch.log").read_text(encoding="utf-8").count("Traceback (most")
    counts.names = wrong + [path.parent.name for path in sorted(records.lost)]


def soak(root: Path, trials: int, seed: int) -> Counts:
    """The whole soak, below `root`. An even number of trials."""
    workplace = Workplace(root)
    seeds = list(range((trials + 1) // 2))
    write(workplace.configs / "study" / "tiny.yaml", STUDY.format(seeds=seeds))
    # Records name their runs_dir, which must be the same text in both folders.
    words = [word for word in workplace.arguments(*SETTINGS) if not word.startswith("runs_dir=")]
    counts, start = Counts(), time.monotonic()
    counts.undisturbed_seconds = run_undisturbed(root / "undisturbed", words)
    records = disturb(root / "disturbed", words, random.Random(seed), counts)
    count(root / "disturbed", root / "undisturbed", records, counts)
    counts.seconds = time.monotonic() - start
    return counts


def as_json(counts: Counts) -> dict[str, Any]:
    values = vars(counts) | {"kills": dict(counts.kills), "all_kills": counts.kills.total()}
    return {key: round(value, 1) if isinstance(value, float) else value for key, value in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200, help="an even number: two rules (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="soak_"))
    counts = soak(root, options.trials, options.seed)
    values = as_json(counts) | {"seed": options.seed}
    if options.json:
        print(json.dumps(values, indent=1))
    else:
        print("\n".join(f"{key:20s} {value}" for key, value in values.items()))
    print(f"folders: {root}", file=sys.stderr)
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
