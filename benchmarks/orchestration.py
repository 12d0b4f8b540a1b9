"""What launching costs: the time of a study's workers that is not training, and where it goes.

    python benchmarks/orchestration.py                    # 40 trials of about 20 s, two at once: 9 minutes
    python benchmarks/orchestration.py --trials 8 --seconds 5 --json
    python benchmarks/orchestration.py tracking=none      # any override of the trials

A study of cpu_50k (two rules, several seeds) is launched by `python -m sweeps.launch`, executor=local. Before
it, one trial per worker is launched twice, to pack the corpus and to measure tokens per second with all
workers busy: a short trial, then one of about --seconds, for steps get faster after the first seconds; from
its rate follows the budget. Then, with W the wall-clock seconds of the launch command from its start to its
end and T the training seconds of the records:

  overhead_per_wall    (W x workers - T) / W              workers that do not train, on average
  overhead_share       (W x workers - T) / (W x workers)  the same as a share of the workers' time
  ..._without_evaluation   the same with evaluation counted as the trial's own work, as training is

The rest is split by the records, the trials' status files and the moments at which the launcher says that a
trial has started and ended. Run it on a machine that does nothing else: trials that wait for a core train for
longer, which makes the share look smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.record import read_record
from attnres.status import read_status

ROOT = Path(__file__).resolve().parents[1]
CALIBRATION_TOKENS = 200_000  # of the short launch
STUDY = """
name: {name}
purpose: What launching costs.
baseline: prenorm
sizes: [cpu_50k]
rules: [prenorm, {{rule: attnres_block, num_blocks: 4}}]
seeds: {seeds}
overrides: [budget=tokens, budget.tokens={tokens}]
"""
# Evaluation is what a study asks for, not what launching costs: two short ones, a hundredth of the training.
EVALUATION = (
    "data.validation_tokens=8192",
    "data.interim_validation_tokens=2048",
    "budget.evaluations=2",
)
EVENT = re.compile(r"\d\d:\d\d:\d\d (?P<name>\S+): (?P<what>started|finished)")


@dataclass(frozen=True)
class Slot:
    """What a worker did for one trial: unix seconds of the launcher's words, and the trial's own files."""

    started: float
    ended: float
    record: Mapping[str, Any]
    status: Mapping[str, Any]

    def parts(self) -> dict[str, float]:
        """Seconds by part; they add up to the slot."""
        timing = self.record["timing"]
        inside = {
            name: timing[f"{name}_seconds"]
            for name in ("train", "evaluation", "startup", "probe", "checkpoint")
        }
        recorded = self.status["started"] + timing["wall_seconds"]
        return {
            **inside,
            # Between the activities: reports, and imports that were not made before.
            "reports": timing["wall_seconds"] - sum(inside.values()),
            "process_start": self.status["started"] - self.started,
            "record_and_wandb": self.status["heartbeat"] - recorded,
            "process_end": self.ended - self.status["heartbeat"],
        }


@dataclass(frozen=True)
class Launched:
    wall_seconds: float
    slots: list[Slot]
    before_first_seconds: float  # of the launcher, until it started a trial
    after_last_seconds: float


def run_launch(folder: Path, name: str, workers: int, more: list[str]) -> Launched:
    """Launch study `name` of `folder`, with the moment of each of the launcher's words."""
    command = [sys.executable, "-m", "sweeps.launch", f"study={name}", f"launch.workers={workers}"]
    command += [f"runs_dir={folder / 'runs'}", *more, "--config-dir", str(folder / "configs")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    start = time.time()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    stopped: list[float] = []
    waiter = threading.Thread(target=lambda: (process.wait(), stopped.append(time.time())))
    waiter.start()
    for line in process.stdout:  # ends with the fork server, some time after the command itself
        if event := EVENT.match(line):
            moments = begun if event["what"] == "started" else ended
            moments[event["name"]] = time.time()
    waiter.join()
    if process.returncode:
        raise SystemExit(f"the launch ended with exit code {process.returncode}: {' '.join(command)}")
    slots = [
        Slot(begun[name], ended[name], record, status)
        for name, record, status in _results(folder / "runs" / name)
    ]
    first, last = min(begun.values()), max(ended.values())
    return Launched(stopped[0] - start, slots, first - start, stopped[0] - last)


def _results(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for path in sorted(folder.glob("*/record.json")):
        record, status = read_record(path), read_status(path.parent)
        assert status is not None
        yield record["name"], record, status


def write_study(folder: Path, name: str, trials: int, tokens: int) -> None:
    path = folder / "configs" / "study" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    seeds = list(range((trials + 1) // 2))
    path.write_text(STUDY.format(name=name, seeds=seeds, tokens=tokens), encoding="utf-8")


def calibrate(folder: Path, workers: int, seconds: float, more: list[str]) -> int:
    """Training tokens that take a trial about `seconds` while all workers are busy."""
    tokens = CALIBRATION_TOKENS
    for name in ("calibration", "calibration_in_full"):
        write_study(folder, name, max(2, workers), tokens)
        slots = run_launch(folder, name, workers, more).slots
        trained = sum(slot.record["timing"]["train_seconds"] for slot in slots)
        tokens = round(seconds * sum(slot.record["tokens"] for slot in slots) / trained)
    return tokens


def summarise(launched: Launched, workers: int) -> dict[str, Any]:
    wall, slots = launched.wall_seconds, launched.slots
    parts = [slot.parts() for slot in slots]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    busy = sum(slot.ended - slot.started for slot in slots)
    starts = launched.before_first_seconds * workers
    totals |= {"launcher_start": starts, "idle_slots": wall * workers - busy - starts}
    train, evaluation = totals["train"], totals["evaluation"]
    idle = wall * workers - train
    return {
        "trials": len(slots),
        "workers": workers,
        "wall_seconds": wall,
        "train_seconds": train,
        "train_seconds_per_trial": train / len(slots),
        "overhead_per_wall": idle / wall,
        "overhead_share": idle / (wall * workers),
        "overhead_per_wall_without_evaluation": (idle - evaluation) / wall,
        "overhead_share_without_evaluation": (idle - evaluation) / (wall * workers),
        "seconds_per_trial": {name: seconds / len(slots) for name, seconds in totals.items()},
        "launcher_start_seconds": launched.before_first_seconds,
        "launcher_end_seconds": launched.after_last_seconds,
        "load_average": os.getloadavg()[0],
    }


def print_summary(result: Mapping[str, Any]) -> None:
    print(
        f"{result['trials']} trials, {result['workers']} workers, {result['wall_seconds']:.1f} s, training "
        f"{result['train_seconds_per_trial']:.2f} s each; load {result['load_average']:.1f} at the end"
    )
    for kind, name in (("wall x workers - training", ""), ("the same - evaluation", "_without_evaluation")):
        per_wall, share = result[f"overhead_per_wall{name}"], result[f"overhead_share{name}"]
        print(f"({kind}) / wall: {per_wall:.1%}; / (wall x workers): {share:.1%}")
    print("\n| seconds of a worker per trial | |\n| --- | --- |")
    for name, seconds in result["seconds_per_trial"].items():
        print(f"| {name} | {seconds:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=40, help="an even number: two rules (default 40)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training per trial (default 20)")
    parser.add_argument("--workers", type=int, default=2, help="trials at once (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, overrides = parser.parse_known_args()
    given = {word.partition("=")[0] for word in overrides}
    more = [word for word in EVALUATION if word.partition("=")[0] not in given] + overrides
    with tempfile.TemporaryDirectory(prefix="orchestration_") as name:
        folder = Path(name)
        tokens = calibrate(folder, options.workers, options.seconds, more)
        write_study(folder, "orchestration", options.trials, tokens)
        result = summarise(run_launch(folder, "orchestration", options.workers, more), options.workers)
    result |= {"overrides": more}
    print(json.dumps(result, indent=1)) if options.json else print_summary(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
