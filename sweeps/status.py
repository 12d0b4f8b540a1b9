"""`python -m sweeps.status study=NAME`: where each trial of a study stands, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnres.cli import help_text, reject_options, run_command, take_flag, take_option, wants_help
from attnres.errors import RecordError
from sweeps.state import STATES, TrialState, foreign_trials, read_state
from sweeps.study import STUDY_FILE, describe, load_study
from sweeps.table import duration, print_table

USAGE = """
usage: python -m sweeps.status study=NAME [runs_dir=DIR] [--json] [--config-dir DIR]

The state of each trial that the last launch planned: finished, diverged, failed, running, preempted
(stopped by a signal, after a checkpoint), cancelled (by sweeps.cancel), stale (its process is gone without a
record, or gives no sign of life) or pending (never started). With any other override, or before the first
launch, the plan is that of the study's configuration.
"""
EXAMPLES = ("python -m sweeps.status study=smoke", "python -m sweeps.status study=smoke --json")


def load_plan(argv: Sequence[str], config_dir: str | None) -> tuple[Path, dict[str, Any]]:
    """The study's folder, and its plan as study.json has it or would have it."""
    given = dict(word.partition("=")[::2] for word in argv)
    if given.keys() <= {"study", "runs_dir"} and given.get("study"):
        folder = Path(given.get("runs_dir", "runs")) / given["study"]
        if (folder / STUDY_FILE).is_file():
            return folder, _read_plan(folder / STUDY_FILE)
    study = load_study(argv, config_dir, lambda line: print(line, file=sys.stderr))
    return study.folder, describe(study)


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        if all({"id", "name", "size", "rule", "seed"} <= trial.keys() for trial in plan["trials"]):
            return dict(plan)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise RecordError(f"{path}: torn or not a study's plan; sweeps.launch writes it again")


def status_json(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The whole status as plain data."""
    states = [read_state(folder / trial["id"]) for trial in plan["trials"]]
    return {
        "study": plan["name"],
        "folder": str(folder),
        "counts": {name: sum(state.state == name for state in states) for name in STATES},
        "foreign": foreign_trials(folder, (trial["id"] for trial in plan["trials"])),
        "trials": [{**trial, **asdict(state)} for trial, state in zip(plan["trials"], states, strict=True)],
    }


def print_status(status: Mapping[str, Any]) -> None:
    columns = ["trial", "state", "step", "loss", "tokens/s", "time", "reason"]
    rows = [_cells(trial) for trial in status["trials"]]
    print_table(f"study {status['study']} in {status['folder']}", columns, rows, ["trial", "state", "reason"])
    counts = [f"{count} {name}" for name, count in status["counts"].items() if count]
    print(f"{len(rows)} planned: {', '.join(counts)}")
    if foreign := status["foreign"]:
        print(f"{len(foreign)} other trial folders are not in this plan (of another budget or version, say)")


def _cells(trial: Mapping[str, Any]) -> list[str]:
    state = TrialState(**{name: trial[name] for name in TrialState.__dataclass_fields__})
    step = "" if state.step is None else f"{state.step:,}/{state.steps:,}"
    return [
        trial["name"],
        state.state,
        step,
        "" if state.loss_nats is None else f"{state.loss_nats:.4f}",
        "" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f}",
        "" if state.train_seconds is None else duration(state.train_seconds),
        state.reason or "",
    ]


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, ("study",), EXAMPLES))
        return 0
    config_dir = take_option(argv, "--config-dir")
    as_json = take_flag(argv, "--json")
    reject_options(argv)
    folder, plan = load_plan(argv, config_dir)
    status = status_json(folder, plan)
    if as_json:
        print(json.dumps(status, indent=1))
    else:
        print_status(status)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
