"""`sweeps.status --watch`: a study as it goes, whoever launched it, from what is in its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps.launches import LaunchNote, running_launches
from sweeps.live import Moment, Screen
from sweeps.signs import SignsOfLife
from sweeps.state import TrialState, read_state
from sweeps.study import with_axes

POLL_SECONDS = 0.5
_FILES_A_SECOND = 200  # that watching asks a file system for


def watch(folder: Path, plan: Mapping[str, Any], screen: Screen, signs: SignsOfLife | None = None) -> None:
    """Show the plan's trials until none runs and no launch is alive.

    Processes of other machines, whose locks are not seen here, are alive while their heartbeat moves.
    """
    trials, signs = plan["trials"], signs or SignsOfLife()
    settled: dict[str, TrialState] = {}
    said: dict[str, str] = {}
    while True:
        launches = [
            note
            for note in running_launches(folder)
            if note.locked or not signs.silent(note.who, note.heartbeat)
        ]
        states = {
            trial["id"]: settled.get(trial["id"]) or _state(folder / trial["id"], signs) for trial in trials
        }
        settled = {trial: state for trial, state in states.items() if state.ended}
        _say_changes(trials, states, said, screen)
        if not launches and not any(state.at_work for state in states.values()):
            return
        if screen.due():
            screen.show(moment(trials, states, launches))
        time.sleep(max(POLL_SECONDS, (len(trials) - len(settled)) / _FILES_A_SECOND))


def _state(folder: Path, signs: SignsOfLife) -> TrialState:
    """As it says; of a running trial that cannot be checked, only while its heartbeat moves."""
    state = read_state(folder)
    if state.state != "running" or state.locked or not signs.silent(folder.name, state.heartbeat):
        return state
    return replace(state, state="stale", reason=f"{state.reason}, which no longer moves")


def moment(
    trials: Sequence[Mapping[str, Any]], states: Mapping[str, TrialState], launches: Sequence[LaunchNote]
) -> Moment:
    """Every trial is counted once: by its own state, or as waiting in a launch that is alive."""
    running = [(trial["name"], states[trial["id"]]) for trial in trials if states[trial["id"]].at_work]
    others = [trial["id"] for trial in trials if not states[trial["id"]].at_work]
    queued = {trial for note in launches for trial in note.running if note.executor != "local"}
    waiting = {trial for note in launches for trial in note.trials}
    done = [t for t in others if states[t].state in ("finished", "diverged", "failed", "cancelled")]
    rest = [t for t in others if t not in done]
    return Moment(
        running=tuple(running),
        done=len(done),
        finished=sum(states[trial].state == "finished" for trial in done),
        failed=sum(states[trial].state in ("failed", "diverged") for trial in done),
        queued=sum(trial in queued for trial in rest),
        waiting=sum(trial in waiting and trial not in queued for trial in rest),
        elsewhere=0,
        left=sum(trial not in waiting for trial in rest),
        eta_seconds=_eta(running, launches),
    )


def _eta(running: Sequence[tuple[str, TrialState]], launches: Sequence[LaunchNote]) -> float | None:
    """Of launches that share the work, the longest; without one, of the trial that runs longest."""
    known = [note.eta_seconds for note in launches] or [state.eta_seconds for _, state in running]
    return max((seconds for seconds in known if seconds is not None), default=None)


def _say_changes(
    trials: Sequence[Mapping[str, Any]],
    states: Mapping[str, TrialState],
    said: dict[str, str],
    screen: Screen,
) -> None:
    """What has become of a trial since the last look."""
    for trial in trials:
        state = states[trial["id"]]
        if said.get(trial["id"], state.state) != state.state:
            loss = f", loss {state.loss_nats:.4f}" if state.state == "finished" else ""
            reason = f": {state.reason}" if state.reason else ""
            name = with_axes(trial["name"], trial.get("axes"))
            screen.say(f"{name}: {state.state}{loss}{reason}")
        said[trial["id"]] = state.state
