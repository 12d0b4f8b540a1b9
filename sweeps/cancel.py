"""`python -m sweeps.cancel study=NAME [TRIAL ...]`: stop trials, with a checkpoint, whoever runs them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnres.cli import help_text, reject_options, run_command, take_option, wants_help
from attnres.stop import ask_to_cancel, cancel_asked
from attnres.words import counted
from sweeps.launches import LaunchNote, running_launches
from sweeps.plan_file import load_plan
from sweeps.state import TrialState, read_state
from sweeps.trial_ids import choose

USAGE = """
usage: python -m sweeps.cancel study=NAME [TRIAL ...] [runs_dir=DIR] [--config-dir DIR]

Stops trials. One that runs writes a checkpoint and ends within a second or a training step, on whichever
machine it is; one that waits, in a launch or in the queue of a cluster, is not started any more. Without
TRIAL: all that run or wait in a launch, which then has no more to do and ends, a detached one too. A
cancelled trial waits for the next launch, which goes on from its checkpoint. Nothing is asked; what was done
is printed.

  TRIAL             the trial's id, an unambiguous beginning of it, or its name; sweeps.status lists them
"""
EXAMPLES = (
    "python -m sweeps.cancel study=smoke",
    "python -m sweeps.cancel study=smoke 3f9a cpu_50k-prenorm-s0-8c21e4",
)


def cancel(folder: Path, plan: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Cancel trials of a plan; returns what was done, in lines. UserError for a word that names none."""
    named = [(trial["id"], trial["name"]) for trial in plan["trials"]]
    launches = running_launches(folder)
    chosen = choose(named, words, plan["name"])
    awaited = {trial for note in launches for trial in note.trials}
    lines, stopped, kept = [], 0, 0
    for trial, name in named:
        if words and trial not in chosen:
            continue
        state = read_state(folder / trial)
        waits = trial in awaited or _is_queued(folder / trial)
        if not words and (state.ended or not (state.at_work or waits)):
            continue
        said = _cancel_one(folder / trial, state, waits)
        stopped, kept = stopped + (said == _STOPS), kept + (said == _NOT_STARTED)
        lines.append(f"{name} ({trial}): {said}")
    if not words:
        lines.append(_summary(stopped, kept, launches))
    return lines


_STOPS = "saves a checkpoint and stops"
_NOT_STARTED = "is not started any more"


def _cancel_one(folder: Path, state: TrialState, waits: bool) -> str:
    if state.ended or (state.state == "failed" and not waits):
        return f"has {state.state}; nothing to cancel"
    if not state.at_work and not waits:
        return f"is {state.state}, and no launch is about to start it; nothing to cancel"
    if cancel_asked(folder) and not state.at_work:
        return "is cancelled already"
    ask_to_cancel(folder)
    return _STOPS if state.at_work else _NOT_STARTED


def _summary(stopped: int, kept: int, launches: Sequence[LaunchNote]) -> str:
    ends = "".join(f"; the launch of {note.who} ends" for note in launches)
    if not stopped and not kept and not launches:
        return "nothing runs, and nothing waits in a launch"
    running = counted(
        stopped, "running trial saves a checkpoint and stops", "running trials save a checkpoint and stop"
    )
    return f"{running}, {counted(kept, 'waiting one is', 'waiting ones are')} not started{ends}"


def _is_queued(folder: Path) -> bool:
    """A job that an earlier launch left in a cluster's queue would still start."""
    return (folder / "slurm.json").exists()


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, ("study",), EXAMPLES))
        return 0
    config_dir = take_option(argv, "--config-dir")
    reject_options(argv)
    words = [word for word in argv if "=" not in word]
    folder, plan = load_plan([word for word in argv if "=" in word], config_dir)
    for line in cancel(folder, plan, words):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
