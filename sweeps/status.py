"""`python -m sweeps.status study=NAME`: where each trial of a study stands, and why."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnres.cli import help_text, one_line, reject_options, run_command, take_flag, take_option, wants_help
from attnres.errors import ConfigError, RecordError, UserError
from attnres.record import read_trial_record
from attnres.unplanned import describe_unplanned
from sweeps.launches import running_launches
from sweeps.plan_file import load_plan
from sweeps.state import STATES, TrialState, foreign_trials, read_state
from sweeps.table import duration, print_table
from sweeps.trial_ids import choose

USAGE = """
usage: python -m sweeps.status study=NAME [TRIAL ...] [runs_dir=DIR] [--watch] [--json] [--config-dir DIR]

The state of each trial that the last launch planned, and the launches that are running. With any other
override, or before the first launch, the plan is that of the study's configuration; nothing is trained,
written or packed. States:

  finished, diverged   it has a record, and is not run again
  running              a process trains it
  stale                its process is gone without a record, or holds its lock but gives no sign of life
  preempted            stopped by a signal after a checkpoint
  cancelled            stopped, or kept from starting, by sweeps.cancel; the next launch goes on with it
  failed               the reason is shown, and whether it was the trial's own or came from outside
  pending              never started

  TRIAL            only these: ids, unambiguous beginnings of them, or names
  --watch          a live table on a terminal, lines on a pipe, until nothing runs and no launch is alive
                   (exit code 0 if all trials have finished, else 1) or Ctrl-C
  --every SECONDS  between two lines of --watch on a pipe (default 30)
  --json           everything, for programs; docs/launching.md has the fields
"""
EXAMPLES = (
    "python -m sweeps.status study=smoke",
    "python -m sweeps.status study=smoke --watch",
    "python -m sweeps.status study=smoke --json",
)
STATUS_SCHEMA = 1
SECONDS_BETWEEN_LINES = 30.0
INTERRUPTED = 130


def status_json(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The whole status as plain data."""
    states = [state_of(folder, trial) for trial in plan["trials"]]
    return {
        "schema": STATUS_SCHEMA,
        "study": plan["name"],
        "folder": str(folder),
        "unknown": plan.get("unknown"),
        "counts": {name: sum(state.state == name for state in states) for name in STATES},
        "launches": [asdict(note) for note in running_launches(folder)],
        "foreign": foreign_trials(folder, (trial["id"] for trial in plan.get("all", plan["trials"]))),
        "trials": [_trial_json(trial, state) for trial, state in zip(plan["trials"], states, strict=True)],
    }


def _trial_json(trial: Mapping[str, Any], state: TrialState) -> dict[str, Any]:
    """The plan and the state; what both may know, the steps, is the plan's where the state has none."""
    steps = trial.get("steps") if state.steps is None else state.steps
    return {**trial, **asdict(state), "steps": steps}


def state_of(folder: Path, trial: Mapping[str, Any]) -> TrialState:
    """A planned trial's state; pending where its id is not known."""
    return read_state(folder / trial["id"]) if trial["id"] is not None else TrialState("pending")


def only(plan: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The plan with the trials that the words name alone; without words the whole."""
    if not words:
        return dict(plan)
    if "unknown" in plan:
        raise UserError(f"{words[0]}: {plan['unknown']}")
    named = [(trial["id"], trial["name"]) for trial in plan["trials"]]
    ids = choose(named, words, plan["name"])
    chosen = [trial for trial in plan["trials"] if trial["id"] in ids]
    return {**plan, "trials": chosen, "all": plan["trials"]}


def print_status(status: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """For people; `plan` is that of the status."""
    axes = list(dict.fromkeys(key for trial in status["trials"] for key in trial.get("axes") or ()))
    columns = ["trial", *axes, "state", "step", "loss", "tokens/s", "time", "reason"]
    rows = [_cells(trial, axes) for trial in status["trials"]]
    print_table(f"study {status['study']} in {status['folder']}", columns, rows, ["trial", "state", "reason"])
    counts = [f"{count} {name}" for name, count in status["counts"].items() if count]
    print(f"{len(rows)} planned: {', '.join(counts)}")
    for note in status["launches"]:
        print(_launch_line(note))
    if status["unknown"]:
        print(status["unknown"])
    if foreign := status["foreign"]:
        print(_unplanned(Path(status["folder"]), foreign, plan.get("all", plan["trials"])))


def _unplanned(folder: Path, ids: Sequence[str], planned: Sequence[Mapping[str, Any]]) -> str:
    records = []
    for trial in ids:
        with suppress(RecordError):
            records.append(read_trial_record(folder / trial))
    return one_line(describe_unplanned(records, planned, len(ids) - len(records)))


def _cells(trial: Mapping[str, Any], axes: Sequence[str]) -> list[str]:
    state = TrialState(**{name: trial[name] for name in TrialState.__dataclass_fields__})
    step = "" if state.step is None else f"{state.step:,}" + (f"/{state.steps:,}" if state.steps else "")
    return [
        trial["name"],
        *(str((trial.get("axes") or {}).get(key, "")) for key in axes),
        state.state,
        step,
        "" if state.loss_nats is None else f"{state.loss_nats:.4f}",
        "" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f}",
        "" if state.train_seconds is None else duration(state.train_seconds),
        state.reason or "",
    ]


def _launch_line(note: Mapping[str, Any]) -> str:
    """A launch that is alive."""
    how = " in the background" if note["detached"] else ""
    counts = f"{len(note['running'])} in hand, {len(note['pending'])} waiting"
    left = "" if note["eta_seconds"] is None else f"; about {duration(note['eta_seconds'])} left"
    return f"launched{how} by process {note['pid']} on {note['host']}: {counts}{left}"


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, ("study",), EXAMPLES))
        return 0
    config_dir, every = take_option(argv, "--config-dir"), _seconds(take_option(argv, "--every"))
    as_json, live = take_flag(argv, "--json"), take_flag(argv, "--watch")
    reject_options(argv)
    if as_json and live:
        raise UserError("--watch: is for people; for programs call --json again and again")
    folder, plan = load_plan([word for word in argv if "=" in word], config_dir)
    plan = only(plan, [word for word in argv if "=" not in word])
    if live and not _watch(folder, plan, every):
        return INTERRUPTED
    status = status_json(folder, plan)
    if as_json:
        print(json.dumps(status, indent=1))
    else:
        print_status(status, plan)
    return 1 if live and status["counts"]["finished"] < len(status["trials"]) else 0


def _watch(folder: Path, plan: Mapping[str, Any], every: float) -> bool:
    """Until nothing runs. False if the user has seen enough."""
    from sweeps.live import open_screen  # rich: the table of a moment starts without it
    from sweeps.watch import watch

    if "unknown" in plan:
        return True
    screen = open_screen(every, at_once=True)
    try:
        watch(folder, plan, screen)
    except KeyboardInterrupt:
        return False
    finally:
        screen.close()
    return True


def _seconds(text: str | None) -> float:
    try:
        seconds = SECONDS_BETWEEN_LINES if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError("--every", text, "a positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(run_command(main))
