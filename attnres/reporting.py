"""Telling the world how a trial goes: tracking rows, status.json and the progress view, from one place.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attnres.eta import Eta
from attnres.notice import warn
from attnres.progress import open_progress
from attnres.run_state import RunState
from attnres.status import StatusFile
from attnres.stop import Preempted
from attnres.tracking import Tracking
from attnres.trial import Trial

if TYPE_CHECKING:
    from attnres.learner import StepResult


class Reporter:
    """Reports of one attempt. `state` is the run's own, read at each call."""

    def __init__(
        self, trial: Trial, state: RunState, status: StatusFile, resume: Mapping[str, Any] | None
    ) -> None:
        self.trial, self.state, self.status = trial, state, status
        opening = partial(state.clock.measure, "startup")  # whenever it comes, it is no training
        self.tracking = Tracking(trial, trial.folder, status.attempts, resume, opening)
        self.view = open_progress(trial.config.runtime.progress, trial.name, trial.steps)
        # What W&B is told at the end: a summary and an exit code. It is that of a failure until there is a
        # record.
        self.outcome: tuple[Mapping[str, Any], int] = ({"status": "failed"}, 1)
        self.eta = Eta(trial, state.step, state.clock.seconds)
        self._last_row = (state.clock.seconds["train"], state.step)
        self._logged = frozenset(trial.evaluation_steps) | {1}  # besides every log_every_steps
        if state.step:
            self.view.say(f"continues at step {state.step:,} of {trial.steps:,} (attempt {status.attempts})")
        self.heartbeat()

    def step(self, result: StepResult) -> None:
        """After optimizer step `state.step`."""
        state, trial = self.state, self.trial
        if state.step % trial.config.runtime.log_every_steps == 0 or state.step in self._logged:
            train_seconds = state.clock.seconds["train"]
            seconds, steps = train_seconds - self._last_row[0], state.step - self._last_row[1]
            self._last_row = (train_seconds, state.step)
            row = {
                "loss_nats": result.loss_nats,
                "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm,
                "tokens_per_second": steps * trial.batch_tokens / seconds,
                "train_seconds": train_seconds,
            }
            self.tracking.log(self._row("train", row))
        tokens_per_second = state.step * trial.batch_tokens / state.clock.seconds["train"]
        eta_seconds = self._eta_seconds()
        self.status.update(
            step=state.step,
            tokens=state.step * trial.batch_tokens,
            loss_nats=state.recent_loss_nats,
            tokens_per_second=tokens_per_second,
            eta_seconds=eta_seconds,
        )
        self.view.update(state.step, state.recent_loss_nats, tokens_per_second, eta_seconds or 0.0)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """After an evaluation; `row` is the record's."""
        self.eta.evaluated(row["step"])
        values = {key: value for key, value in row.items() if key not in ("step", "tokens")}
        self.tracking.log(self._row("evaluation", values))
        error = row["standard_error"]
        spread = f" ± {error:.4f}" if error is not None else ""
        self.view.say(
            f"step {row['step']:,}: validation loss {row['loss_nats']:.4f}{spread} nats, "
            f"{row['bits_per_byte']:.4f} bits per byte"
        )

    def diverged(self, reason: str) -> None:
        self.tracking.log(self._row("diverged", {"reason": reason}))
        warn(f"{self.trial.name}: diverged: {reason}")

    def heartbeat(self, windows: int = 0) -> None:
        """Still alive, in the middle of something long: an evaluation that has read so many more windows."""
        self.eta.evaluating(windows)
        moment: dict[str, Any] = {
            "step": self.state.step,
            "tokens": self.state.step * self.trial.batch_tokens,
        }
        if (eta_seconds := self._eta_seconds()) is not None:
            moment["eta_seconds"] = eta_seconds
        self.status.update(**moment)

    def metrics_state(self) -> dict[str, Any]:
        """What the checkpoint keeps of metrics.jsonl."""
        return self.tracking.metrics.state()

    @property
    def metrics_rows_missing(self) -> int:
        return self.tracking.metrics.missing_rows

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.view.close()
        summary, exit_code = self.outcome
        if isinstance(error, Preempted):
            summary, exit_code = {"status": error.state}, error.exit_code
        self.tracking.finish(summary, exit_code)

    def _row(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self.state.step * self.trial.batch_tokens
        flops = self.trial.counts.flops_per_token * tokens
        return {"kind": kind, "step": self.state.step, "tokens": tokens, "flops": flops, **values}

    def _eta_seconds(self) -> float | None:
        """Seconds left at this attempt's pace."""
        evaluations = self.state.evaluations
        return self.eta.left(self.state.step, evaluations[-1]["step"] if evaluations else -1)
