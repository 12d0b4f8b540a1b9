"""`python -m sweeps.plan study=NAME`: what a study would run and what it costs on this machine.

docs/plan.md describes the table and the JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnres.cli import help_text, reject_options, run_command, take_flag, take_option, wants_help
from attnres.config import NAME_PATTERN
from attnres.errors import ConfigError
from attnres.words import counted
from sweeps.calibration import Calibration, known, makespan, timed_on
from sweeps.capacity import capacity
from sweeps.jobs import launch_order
from sweeps.memory_need import Need, memory_warnings, need
from sweeps.rates import LEARNING_RATE
from sweeps.state import TrialState, read_state
from sweeps.study import PlannedTrial, Study, load_study
from sweeps.table import duration, gigabytes, number, print_table
from sweeps.timing import calibrate

if TYPE_CHECKING:
    from sweeps.power_lines import StudyPower

USAGE = """
usage: python -m sweeps.plan study=NAME [key=value ...] [options]

The table of a study's trials: parameters, tokens, FLOPs, steps, estimated time and peak memory on this
machine, and totals. A warning says where the trials that run at once need more memory than there is.

  study.KEY=VALUE   changes the study: study.seeds=[0,1] study.axes.optim.beta2=[0.9,0.95]
  launch.workers=N  trials at once (default: cores / those of a trial, runtime.threads * processes)
  executor=NAME     counts trials at once as this executor would; times stay those of this machine
  runs_dir=DIR      where records are (default: runs)
  rates=NAME        learning rates from DIR/rates/NAME.yaml (docs/hyperparameters.md)
  anything else     an override of every trial: budget=tokens budget.tokens=1e6 runtime.threads=2
  --trials          one row for each trial, instead of one for all seeds
  --json            everything, for programs
  --pilot STUDY     noise and exponent from the records of this study in runs_dir, to say what the planned one
                    can tell (default: its own records, else assumed values)
  --budget-hours H  designs that take longer, or more than --budget-flops F, are not called sufficient
  --no-power        leaves that out
  --no-calibrate    no estimates but those already known; memory then is a lower bound
  --recalibrate     time all shapes again (the machine was busy the last time, say)
  --config-dir DIR  your own YAML files, DIR/study/NAME.yaml among them
"""
EXAMPLES = (
    "python -m sweeps.plan study=smoke",
    "python -m sweeps.plan study=scaling_law study.seeds=[0] launch.workers=4",
    "python -m sweeps.plan study=smoke budget=tokens budget.tokens=1e5 --json",
)
GROUPS = (
    "study",
    "executor",
    "rates",
    "model",
    "residual",
    "data",
    "optim",
    "schedule",
    "budget",
    "runtime",
    "tracking",
)


@dataclass(frozen=True)
class PlanRow:
    """A trial, what it costs and where it stands."""

    planned: PlannedTrial
    state: TrialState
    seconds: float | None  # estimated wall time of the whole trial on this machine
    memory: Need  # peak


def plan_rows(study: Study, calibrations: Mapping[str, Calibration]) -> list[PlanRow]:
    rows = []
    for planned in study.trials:
        calibration = calibrations.get(planned.cell)
        seconds = calibration.trial_seconds(planned) if calibration else None
        memory = need(planned, calibrations)
        rows.append(PlanRow(planned, read_state(planned.trial.folder), seconds, memory))
    return rows


def totals(study: Study, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Sums over the study. Times in seconds, None where a trial's is not known."""
    by_id = {row.planned.trial.id: row for row in rows}
    ordered = [by_id[planned.trial.id] for planned in launch_order(study.trials)]
    left = [row for row in ordered if not row.state.ended]
    return {
        "trials": len(rows),
        "ended": len(rows) - len(left),
        "tokens": sum(row.planned.trial.tokens for row in rows),
        "flops": sum(row.planned.flops for row in rows),
        "worker_seconds": _sum(rows),
        "wall_seconds": _wall(ordered, capacity(study).workers),
        "wall_seconds_left": _wall(left, capacity(study).workers),
    }


def plan_json(
    study: Study,
    rows: Sequence[PlanRow],
    power: StudyPower | str | None = None,
    memory: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole plan as plain data. `power` is null where it was not asked for, or cannot be said."""
    at_once = capacity(study)
    return {
        "study": study.name,
        "folder": str(study.folder),
        "executor": at_once.executor,
        "workers": at_once.workers,
        "threads": study.threads,
        "timed_on": _timed_on(study),
        "note": at_once.note,
        "totals": totals(study, rows),
        "warnings": [*warnings(study), *memory],
        "power": None if power is None or isinstance(power, str) else power.as_json(),
        "trials": [_trial_json(row) for row in rows],
    }


def warnings(study: Study) -> list[str]:
    """Warnings of trials and their rates, each once, with the cells that have it."""
    cells: dict[str, list[str]] = {}
    rates = study.config.rates
    for planned in study.trials:
        found = list(planned.trial.warnings)
        if why := rates.other_budget(planned.size, planned.rule, planned.trial.tokens):
            found.append(f"rates={rates.name} were {why}; the best rate depends on the budget")
        for warning in found:
            cells.setdefault(warning, []).append(planned.cell)
    return [f"{', '.join(dict.fromkeys(names))}: {warning}" for warning, names in cells.items()]


def print_plan(
    study: Study,
    rows: Sequence[PlanRow],
    each: bool,
    power: StudyPower | str | None = None,
    memory: Sequence[str] = (),
) -> None:
    """The plan for people: one row for each cell, or with `each` for each trial."""
    groups: dict[str, list[PlanRow]] = {}
    for row in rows:
        groups.setdefault(row.planned.trial.name if each else row.planned.cell, []).append(row)
    axes = list(study.trials[0].axes)
    columns = [
        "size",
        "rule",
        *axes,
        "seeds",
        *([] if LEARNING_RATE in axes else ["rate"]),
        "parameters",
        "tokens",
        "steps",
        "FLOPs",
        "epochs",
        "time",
        "memory",
        "done",
    ]
    table = [_cells(group, axes) for group in groups.values()]
    print_table(f"study {study.name}: {study.config.study.purpose}", columns, table, ["size", "rule"])
    print(_summary(study, totals(study, rows)))
    if power is not None:
        print("\n".join([power] if isinstance(power, str) else power.lines()))
    for warning in (*warnings(study), *memory):
        print(f"warning: {warning}")


def _timed_on(study: Study) -> str:
    return ", ".join(timed_on(device) for device in dict.fromkeys(p.trial.device for p in study.trials))


def _cells(group: Sequence[PlanRow], axes: Sequence[str]) -> list[str]:
    planned, trial = group[0].planned, group[0].planned.trial
    ended = sum(row.state.ended for row in group)
    return [
        planned.size,
        planned.rule,
        *(str(planned.axes[key]) for key in axes),
        ",".join(str(row.planned.seed) for row in group),
        *([] if LEARNING_RATE in axes else [f"{trial.config.optim.learning_rate:.4g}"]),
        number(trial.counts.non_embedding_parameters),
        number(trial.tokens),
        f"{trial.steps:,}",
        f"{planned.flops:.2e}",
        f"{trial.epochs:.2g}",
        duration(group[0].seconds),
        ("" if group[0].memory.measured else ">= ") + gigabytes(group[0].memory.bytes),
        "yes" if ended == len(group) == 1 else f"{ended}/{len(group)}",
    ]


def _summary(study: Study, total: Mapping[str, Any]) -> str:
    trials = f"{counted(total['trials'], 'trial')} ({total['ended']} done), {number(total['tokens'])} tokens"
    threads = "1 thread" if study.threads == 1 else f"{study.threads} threads"
    at_once = capacity(study)
    upto = "" if at_once.here else "up to "
    line = f"{trials}, {total['flops']:.3g} FLOPs; {upto}{at_once.workers} at once, {threads} each"
    if total["wall_seconds"] is not None:
        line += f": about {duration(total['wall_seconds'])}"
    if total["ended"] and total["wall_seconds_left"] is not None:
        line += f", {duration(total['wall_seconds_left'])} left"
    lines = [
        f"{line}. Parameters are without embedding and unembedding; time and memory are of one trial.",
        *([f"Timed on {_timed_on(study)}."] if total["wall_seconds"] is not None else []),
    ]
    return "\n".join([*lines, *([at_once.note] if at_once.note else [])])


def _trial_json(row: PlanRow) -> dict[str, Any]:
    planned, trial = row.planned, row.planned.trial
    return {
        "id": trial.id,
        "name": trial.name,
        "size": planned.size,
        "rule": planned.rule,
        "seed": planned.seed,
        "axes": dict(planned.axes),
        "parameters": {
            "non_embedding": trial.counts.non_embedding_parameters,
            "total": trial.counts.total_parameters,
        },
        "tokens": trial.tokens,
        "steps": trial.steps,
        "flops": planned.flops,
        "epochs": trial.epochs,
        "learning_rate": trial.config.optim.learning_rate,
        "seconds": row.seconds,
        "peak_memory_bytes": row.memory.bytes,
        "peak_memory_measured": row.memory.measured,
        "state": row.state.state,
        "folder": str(trial.folder),
    }


def _sum(rows: Sequence[PlanRow]) -> float | None:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return sum(seconds) if len(seconds) == len(rows) else None


def _wall(rows: Sequence[PlanRow], workers: int) -> float | None:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return makespan(seconds, workers) if len(seconds) == len(rows) else None


def say(line: str) -> None:
    """Notes go to stderr: stdout is the table or the JSON."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, GROUPS, EXAMPLES))
        return 0
    config_dir = take_option(argv, "--config-dir")
    as_json, each = take_flag(argv, "--json"), take_flag(argv, "--trials")
    pilot, no_power = take_option(argv, "--pilot"), take_flag(argv, "--no-power")
    flops, hours = _budget(argv, "--budget-flops"), _budget(argv, "--budget-hours")
    if pilot is not None and not NAME_PATTERN.fullmatch(pilot):
        raise ConfigError("--pilot", pilot, "name a study")
    skip, again = take_flag(argv, "--no-calibrate"), take_flag(argv, "--recalibrate")
    reject_options(argv)
    study = load_study(argv, config_dir, say)
    calibrations = known(study) if skip else calibrate(study, say, config_dir, again)
    rows = plan_rows(study, calibrations)
    memory = memory_warnings(study, calibrations, capacity(study))
    power = None
    if not no_power:
        from sweeps.power_lines import study_power  # pandas and scipy: --help starts without them

        power = study_power(study, rows, pilot, flops, hours)
    if as_json:
        print(json.dumps(plan_json(study, rows, power, memory), indent=1, allow_nan=False))
    else:
        print_plan(study, rows, each, power, memory)
    return 0


def _budget(argv: list[str], option: str) -> float | None:
    text = take_option(argv, option)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(option, text, "a positive number")
    return value


if __name__ == "__main__":
    sys.exit(run_command(main))
