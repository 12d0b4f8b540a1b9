"""Where a trial's numbers go: metrics.jsonl always, and W&B beside it, whose trouble costs nothing else.

W&B facts that this file is built around (client 0.31): without a mode and a key, init asks on a terminal and
waits for ever; log raises once its own process is gone; a full disk loses its rows in silence; without finish
the next trial of the process writes into the old run. Its client is imported only when it is used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from attnres.config import to_mapping
from attnres.metrics import MetricsFile
from attnres.notice import warn
from attnres.trial import Trial
from attnres.wandb_key import has_key, hide, reason
from attnres.wandb_service import (
    choose_mode,
    is_starting,
    probe,
    quiet_logging,
    set_up,
    tear_down,
    wait_for_start,
)

IDENTITY_VARIABLES = ("WANDB_RUN_ID", "WANDB_NAME")
SECONDS_BETWEEN_FLUSHES = 15.0  # W&B's own interval
STUDY_FILE = "study.json"  # what a launcher has written beside the trials' folders, if one has
MOST_PLAN_CHARACTERS = 500_000  # W&B asks for values below a megabyte
FINISH_TIMEOUT_SECONDS = 120.0  # an upload that hangs at the end must not hold up the next trial


class Tracking:
    """metrics.jsonl and the W&B run of one attempt at a trial."""

    def __init__(
        self,
        trial: Trial,
        folder: Path,
        attempt: int,
        resume: Mapping[str, Any] | None,
        opening: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`opening` is entered while the W&B run is opened, be it in the midst of training: it times it."""
        self.metrics = MetricsFile(folder, resume)
        self._opening = opening
        self._folder = folder
        self._steps = {row["step"] for row in self.metrics.rows()}  # of earlier attempts
        self._open = partial(open_wandb, trial, folder, attempt)
        self._wandb: WandbRun | None = None
        self._waiting: list[Mapping[str, Any]] | None = []  # rows for W&B until its run is open
        self._open_wandb()

    def log(self, row: Mapping[str, Any]) -> None:
        """One row, as `attnres.metrics` describes it."""
        self.metrics.write(row)
        self._steps.add(row["step"])
        if self._waiting is not None:
            self._waiting.append(row)
            self._open_wandb()
        elif self._wandb:
            self._wandb.log(row)

    def _open_wandb(self, wait: bool = False) -> None:
        """Open the run, unless its process is still starting: the training goes on meanwhile."""
        if self._waiting is None or (is_starting() and not wait):
            return
        waiting, self._waiting = self._waiting, None
        with self._opening():
            self._wandb = self._open()
        for row in waiting:
            if self._wandb:
                self._wandb.log(row)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close both. `summary` is what W&B shows of the run in tables; exit code 0 means finished.

        W&B is also told how many rows the history of all attempts has, and the study's plan: with them the
        analysis can do without the folders.
        """
        self.metrics.close()
        self._open_wandb(wait=True)
        if self._wandb:
            more = {"history_rows": len(self._steps), **study_plan(self._folder.parent)}
            self._wandb.finish({**summary, **more}, exit_code)


class WandbRun:
    """A W&B run that stops at its first trouble, with one warning. Local files never depend on it."""

    def __init__(self, run: Any, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._probed = time.monotonic()

    def log(self, row: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        values = {name: value for name, value in row.items() if name not in ("kind", "step")}
        prefix = {"train": "train/", "evaluation": "validation/"}.get(row["kind"], "")
        named = {key if key in ("tokens", "flops") else prefix + key: value for key, value in values.items()}
        try:
            with quiet_logging():
                if time.monotonic() - self._probed > SECONDS_BETWEEN_FLUSHES:
                    self._probed = time.monotonic()
                    probe(self._folder)
                # Rows of one step, such as its training and its evaluation, become one row.
                self._run.log(named, step=row["step"])
        except Exception as error:  # whatever ails W&B, the training is worth more
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._run is None:
            return
        try:
            with quiet_logging():
                probe(self._folder)
                self._run.summary.update(json.loads(hide(json.dumps(dict(summary)))))
                self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warn(f"W&B: {reason(error)}: its run ends here; metrics.jsonl and record.json go on")
        tear_down()


def open_wandb(trial: Trial, folder: Path, attempt: int) -> WandbRun | None:
    """The W&B run of a trial in the mode that the environment and the configuration ask for, or None.

    Raises UserError for a WANDB_MODE that does not exist; all other trouble is a warning, and the mode falls
    from online to offline, from offline to none.
    """
    wait_for_start()
    mode = choose_mode(trial.config.tracking.wandb)
    if mode == "online" and not has_key():
        warn("W&B: no API key (WANDB_API_KEY or `wandb login`): writing offline files instead")
        mode = "offline"
    for name in IDENTITY_VARIABLES:
        # Of a sweep's agent it is the run that this very trial is to be.
        if mode != "disabled" and name in os.environ and "WANDB_SWEEP_ID" not in os.environ:
            warn(f"W&B: {name} is not used: it would make one run of all trials")
    for tried in {"online": ("online", "offline"), "offline": ("offline",), "disabled": ()}[mode]:
        try:
            with quiet_logging():
                return _init(trial, folder, attempt, tried)
        except Exception as error:
            otherwise = "writing offline files instead" if tried == "online" else "going on without W&B"
            warn(f"W&B ({tried}): {reason(error)}: {otherwise}")
            tear_down()
    return None


def _init(trial: Trial, folder: Path, attempt: int, mode: str) -> WandbRun:
    config, environment = trial.config, os.environ
    root = set_up(folder, mode)

    import wandb

    settings: dict[str, Any] = {
        "console": "off",  # captured output would be a second, worse metrics file
        "silent": True,
        "disable_code": True,
        "init_timeout": config.tracking.init_timeout_seconds,
        "finish_timeout": FINISH_TIMEOUT_SECONDS,
        "x_disable_stats": trial.device == "cpu",  # sampling costs a share of the one thread that trains
    }
    settings = {key: value for key, value in settings.items() if f"WANDB_{key.upper()}" not in environment}
    known = wandb.Settings.model_fields
    # Offline files cannot be resumed: every attempt is a run of its own. `config.trial_id` joins them, the
    # latest wins.
    run_id = trial.id if attempt == 1 or mode == "online" else f"{trial.id}-{attempt}"
    ours: dict[str, tuple[str, Any]] = {
        "WANDB_PROJECT": ("project", config.tracking.project),
        "WANDB_ENTITY": ("entity", config.tracking.entity),
        "WANDB_RUN_GROUP": ("group", config.study_name),
        "WANDB_JOB_TYPE": ("job_type", config.model.name),
        "WANDB_TAGS": ("tags", [hide(tag) for tag in config.tracking.tags]),
    }
    arguments: dict[str, Any] = {"mode": mode}
    arguments |= {
        argument: value for variable, (argument, value) in ours.items() if variable not in environment
    }
    command, sys.argv = sys.argv, [hide(word) for word in sys.argv]  # which the client notes down
    try:
        run = wandb.init(
            dir=str(root),
            id=run_id,
            name=trial.name,
            resume="allow" if mode == "online" else None,
            config={
                **json.loads(hide(json.dumps(to_mapping(config)))),
                "trial_id": trial.id,
                "attempt": attempt,
                "rule": config.residual.label(),
            },
            settings=wandb.Settings(**{key: value for key, value in settings.items() if key in known}),
            reinit="finish_previous",
            **arguments,
        )
    finally:
        sys.argv = command
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    return WandbRun(run, root / "wandb")


def study_plan(study_folder: Path) -> dict[str, str]:
    """`study_plan`: the text of study.json without its blanks, where there is one and W&B can take it."""
    try:
        plan = json.loads((study_folder / STUDY_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn(f"W&B: {study_folder / STUDY_FILE}: {reason(error)}: the run goes without the study's plan")
        return {}
    text = json.dumps(plan, separators=(",", ":"))
    return {"study_plan": text} if len(text) <= MOST_PLAN_CHARACTERS else {}
