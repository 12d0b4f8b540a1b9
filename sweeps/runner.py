"""The loop of a launch: keeps the executor busy until every trial of a study has ended or cannot.

One trial's failure does not stop the rest, unless the user wants that. Only what came from outside (a signal,
the memory killer) is retried: an exception or a diverged loss would come again. A trial that another process
is training is left to it, and taken over if that process dies. A trial that the user cancels meanwhile is
stopped, or not started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic

from attnres.lock import EXIT_BUSY, is_locked
from attnres.origin import Origin
from attnres.stop import EXIT_CANCELLED, cancel_asked
from attnres.words import counted
from sweeps.endings import EXIT_LOST, from_outside, last_words
from sweeps.executor import Executor, ServerLost
from sweeps.jobs import FailurePolicy, Handle, Job, Progress, View
from sweeps.signs import SignsOfLife
from sweeps.state import TrialState, read_state
from sweeps.study import PlannedTrial
from sweeps.trial_process import leave_word

POLL_SECONDS = 0.25
LOOK_SECONDS = 1.0  # between two looks at trials of other processes, and for cancelled ones
_FILES_A_SECOND = 500  # that such a look may ask a file system for


class Runner(Generic[Handle]):
    """Runs what has no finished or diverged record, and has not failed of its own before."""

    def __init__(
        self,
        executor: Executor[Handle],
        view: View,
        workers: int,
        max_retries: int,
        grace_seconds: float,
        policy: FailurePolicy | None = None,
    ) -> None:
        self.executor = executor
        self.view = view
        self.workers = workers
        self.max_retries = max_retries
        self.grace_seconds = grace_seconds
        self.policy = policy or FailurePolicy()
        self.progress: Progress[Handle] = Progress()
        self._looked = 0.0
        self._signs = SignsOfLife()
        self._interrupted: Callable[[], int] = lambda: 0

    def run(self, trials: Sequence[PlannedTrial], interrupted: Callable[[], int]) -> Progress[Handle]:
        """Run the trials. `interrupted` says how many times the user asked to stop; once is enough."""
        jobs = deque(Job[Handle](planned) for planned in trials)
        progress = Progress(pending=jobs, queues=self.executor.queues)
        self.progress, self._interrupted = progress, interrupted
        try:
            while progress.pending or progress.running or progress.elsewhere:
                if interrupted() or (self.policy.on_failure == "stop" and progress.failed_now):
                    break
                if self.policy.max_failures is not None and progress.failed_now >= self.policy.max_failures:
                    self._start_no_more()
                self._fill()
                self.view.update(progress)
                self.executor.wait(self._handles(), POLL_SECONDS)
                self._collect()
                self._look_around()
        finally:
            self._stop_all()
            self.executor.close()
        self.view.update(progress)
        return progress

    def _fill(self) -> None:
        progress = self.progress
        while progress.pending and len(progress.running) < self.workers and not self._interrupted():
            job = progress.pending.popleft()
            state = read_state(job.planned.trial.folder)
            if state.ended:
                self._end(job, state)
            elif other := self._elsewhere(job, state):
                self.view.say(f"{job.planned.title}: {other}")
                progress.elsewhere.append(job)
            elif self._is_left_alone(job, state):
                self._end(job, state)
            else:
                self._start(job, state)

    def _is_left_alone(self, job: Job[Handle], state: TrialState) -> bool:
        """Cancelled since the launch began, or a failure that would come again."""
        if cancel_asked(job.planned.trial.folder):
            return True
        again = job.attempts > 0 or self.policy.retry_failed
        return state.state == "failed" and state.origin == "own" and not again

    def _elsewhere(self, job: Job[Handle], state: TrialState) -> str | None:
        """Who else is at it. A silent process of another machine is believed dead only after a long look."""
        if other := self.executor.elsewhere(job.planned):
            return other
        if state.state != "running" or job.attempts:
            return None
        silent = self._signs.silent(job.planned.trial.id, state.heartbeat)
        return None if silent else f"running {state.reason}"

    def _start(self, job: Job[Handle], state: TrialState) -> None:
        job.attempts, job.attempts_before = job.attempts + 1, state.attempts or 0
        try:
            job.handle = self.executor.submit(job.planned)
        except OSError as error:
            if isinstance(error, ServerLost) and job.attempts <= self.max_retries:
                self.view.say(f"{job.planned.title}: could not be started: {error}; tried again")
                self.progress.pending.appendleft(job)
            else:
                self._fail(job, f"could not be started: {error}", "outside")
            return
        self.progress.running.append(job)
        why = f" ({state.past})" if state.past else ""
        done = "submitted" if self.executor.queues else "started"
        self.view.say(f"{job.planned.title}: {done}{why}")

    def _collect(self) -> None:
        for job in list(self.progress.running):
            assert job.handle is not None
            code = self.executor.poll(job.handle)
            if code is not None:
                self.progress.running.remove(job)
                cause = self.executor.cause(job.handle)
                job.handle = None
                self._settle(job, code, cause)

    def _settle(self, job: Job[Handle], code: int, cause: str | None = None) -> None:
        """An attempt has ended: done, to be tried again, or failed. The record outweighs the exit code."""
        folder, name = job.planned.trial.folder, job.planned.title
        state = read_state(folder)
        told_failure = state.state == "failed" and (state.attempts or 0) > job.attempts_before
        if state.ended:
            self._end(job, state)
        elif code == EXIT_BUSY or (code == EXIT_LOST and is_locked(folder)):
            job.attempts -= 1
            self.progress.elsewhere.append(job)
        elif cancel_asked(folder):
            self._end(job, state)
        elif job.withdrawn:
            self.progress.left.append(job)
        elif code == EXIT_CANCELLED:
            self._end(job, replace(state, reason="its job was cancelled; a launch submits it again"))
        elif code == EXIT_LOST and told_failure:
            self._end(job, state)
        elif cause := cause or from_outside(code):
            if job.attempts <= self.max_retries:
                self.view.say(f"{name}: {cause}; tried again")
                self.progress.pending.appendleft(job)
            else:
                self._fail(job, cause + (f", {job.attempts} times" if job.attempts > 1 else ""), "outside")
        elif code == 0:
            self._fail(job, "its process ended without an error and without a finished record", "outside")
        elif told_failure:
            self._end(job, state)
        else:
            self._fail(job, *last_words(job.planned, code))

    def _fail(self, job: Job[Handle], reason: str, origin: Origin) -> None:
        leave_word(job.planned.trial, reason, origin)
        self._end(job, TrialState("failed", reason, origin))

    def _end(self, job: Job[Handle], state: TrialState) -> None:
        job.state = state
        self.progress.done.append(job)
        if job.attempts or state.state not in ("finished", "failed"):  # these were said by an earlier launch
            loss = f", loss {state.loss_nats:.4f}" if state.state == "finished" else ""
            reason = f": {state.reason}" if state.reason else ""
            self.view.say(f"{job.planned.title}: {state.state}{loss}{reason}")

    def _look_around(self) -> None:
        """Trials of other processes, finished or free to be taken over; trials that the user cancels."""
        progress = self.progress
        files = len(progress.pending) + len(progress.running)
        if time.monotonic() - self._looked < max(LOOK_SECONDS, files / _FILES_A_SECOND):
            return
        self._looked = time.monotonic()
        for job in list(progress.elsewhere):
            if self._elsewhere(job, read_state(job.planned.trial.folder)) is None:
                progress.elsewhere.remove(job)
                progress.pending.append(job)
        for job in list(progress.pending):
            if cancel_asked(job.planned.trial.folder):
                progress.pending.remove(job)
                self._end(job, read_state(job.planned.trial.folder))
        for job in progress.running:
            if cancel_asked(job.planned.trial.folder):
                self._see_to_cancel(job)

    def _see_to_cancel(self, job: Job[Handle]) -> None:
        """A trial that trains sees the file itself. One that does not yet, or hangs, needs help."""
        assert job.handle is not None
        now = time.monotonic()
        if job.cancelled_at is None:
            job.cancelled_at = now
            if not is_locked(job.planned.trial.folder):
                self.executor.withdraw(job.handle)
        elif now - job.cancelled_at > self.grace_seconds:
            self.view.say(f"{job.planned.title}: does not stop; killed")
            self.executor.stop(job.handle, force=True)
            job.cancelled_at = float("inf")

    def _start_no_more(self) -> None:
        """After too many failures. What waits in a cluster's queue has not started either."""
        progress = self.progress
        if progress.pending:
            progress.left += progress.pending
            progress.pending.clear()
        for job in progress.running if self.executor.queues else ():
            if not job.withdrawn and not is_locked(job.planned.trial.folder):
                assert job.handle is not None
                job.withdrawn = True
                self.executor.withdraw(job.handle)

    def _stop_all(self) -> None:
        """Ask every attempt to write its checkpoint and end; kill what does not within the grace time."""
        handles = self._still_running()
        if not handles:
            return
        for handle in handles:
            self.executor.stop(handle)
        # Only now: if nobody listens any more (a terminal that was closed), the trials have been told.
        with suppress(OSError, ValueError):
            trials = counted(len(handles), "trial saves its checkpoint", "trials save their checkpoints")
            self.view.say(f"stopping: {trials} (interrupt again to kill)")
        deadline = time.monotonic() + self.grace_seconds
        asked = self._interrupted()
        while self._still_running():
            if time.monotonic() > deadline or self._interrupted() > max(asked, 1):
                for handle in self._still_running():
                    self.executor.stop(handle, force=True)
                deadline = float("inf")
            self.executor.wait(self._still_running(), POLL_SECONDS)

    def _handles(self) -> list[Handle]:
        return [job.handle for job in self.progress.running if job.handle is not None]

    def _still_running(self) -> list[Handle]:
        return [handle for handle in self._handles() if self.executor.poll(handle) is None]
