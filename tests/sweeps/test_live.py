"""What people see while a study runs."""

from __future__ import annotations

import io
import json
import time
from collections import deque

import pytest
from rich.console import Console
from sweeps_support import Workplace

from attnres.lock import TrialLock
from sweeps.jobs import Job, Progress
from sweeps.live import Lines, LiveTable, Moment, Watch, headline, moment_of, render
from sweeps.state import TrialState
from sweeps.study import Study
from sweeps.study_eta import StudyEta

STATUS = {"state": "running", "attempts": 1, "first_started": 1.0, "step": 10, "steps": 40, "loss_nats": 2.5}


@pytest.fixture(scope="module")
def study(shared_workplace: Workplace) -> Study:
    return shared_workplace.study()


def progress_of(study: Study) -> Progress[int]:
    """One done, one running (a quarter of it), one failed, one waiting."""
    done, running, failed, waiting = (Job[int](planned) for planned in study.trials)
    done.state = TrialState("finished", loss_nats=2.0, train_seconds=10.0)
    failed.state = TrialState("failed", "no luck")
    folder = running.planned.trial.folder
    folder.mkdir(parents=True, exist_ok=True)
    moment = {"tokens_per_second": 900.0, "eta_seconds": 30.0, "heartbeat": time.time()}
    (folder / "status.json").write_text(json.dumps(STATUS | moment))
    return Progress(deque([waiting]), [running], [], [done, failed])


def test_eta_is_the_work_left_over_the_workers(study: Study) -> None:
    progress = progress_of(study)
    waiting = study.trials[3].trial.id
    states = {study.trials[1].trial.id: TrialState("running", eta_seconds=30.0)}
    assert StudyEta({waiting: 50.0}, 1).left(progress, states) == 80.0
    assert StudyEta({waiting: 50.0}, 2).left(progress, states) == 40.0
    # One long trial cannot be shared.
    assert StudyEta({waiting: 2.0}, 2).left(progress, states) == 30.0
    # Without an estimate, from the FLOPs and the time of what has finished.
    rate = 10.0 / study.trials[0].flops
    assert StudyEta({}, 1).left(progress, states) == pytest.approx(30.0 + rate * study.trials[3].flops)


def test_eta_counts_what_others_train(study: Study) -> None:
    """Their workers are not ours: the longest of theirs, or all of ours."""
    progress, (_, running, _, other) = progress_of(study), (planned.trial.id for planned in study.trials)
    progress.elsewhere.append(progress.pending.pop())
    states = {
        running: TrialState("running", eta_seconds=30.0),
        other: TrialState("running", eta_seconds=70.0),
    }
    assert StudyEta({}, 1).left(progress, states) == 70.0
    states[other] = TrialState("running", eta_seconds=10.0)
    assert StudyEta({}, 1).left(progress, states) == 30.0
    progress.running.clear()
    assert StudyEta({}, 1).left(progress, states) == 10.0
    progress.done.clear()
    assert StudyEta({}, 1).left(progress, {}) is None
    assert "left" not in headline(moment_of(progress, StudyEta({}, 2)))


def test_eta_is_unknown_at_first(study: Study) -> None:
    progress = Progress[int](deque(Job[int](planned) for planned in study.trials))
    assert StudyEta({}, 2).left(progress, {}) is None
    assert StudyEta({}, 2).left(Progress(), {}) == 0.0


def test_lines_on_a_pipe(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_of(study)
    watch = Watch(Lines(0.05), StudyEta({}, 2))
    with TrialLock(study.trials[1].trial.folder):
        watch.update(progress)
        assert capsys.readouterr().out == ""  # not yet
        time.sleep(0.06)
        watch.update(progress)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "1 of 4 finished, 1 failed or diverged, 1 running, 1 waiting; about" in line
    assert f"{study.trials[1].trial.name} 25% loss 2.500 900 tokens/s 30 s left" in line


def test_table_on_a_terminal(study: Study) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    progress = progress_of(study)
    watch = Watch(LiveTable(console), StudyEta({}, 2))
    with TrialLock(study.trials[1].trial.folder):
        watch.update(progress)
    watch.say("an [event]")
    watch.close()
    text = output.getvalue()
    for part in (study.trials[1].trial.name, "10/40", "25%", "2.500", "900", "1 of 4 finished", "an [event]"):
        assert part in text


def test_headline_counts_what_others_train(study: Study) -> None:
    jobs = [Job[int](planned) for planned in study.trials]
    progress = Progress[int](deque(jobs[:1]), [], jobs[1:], [])
    assert (
        headline(moment_of(progress, StudyEta({}, 2)))
        == "0 of 4 finished, 0 running, 1 waiting, 3 trained by another process"
    )


def moment(**counts: object) -> Moment:
    fields = dict.fromkeys(Moment.__dataclass_fields__, 0) | {"running": (), "eta_seconds": None}
    return Moment(**fields | counts)  # type: ignore[arg-type]


def test_headline_counts_failures_and_cancelled_trials_apart() -> None:
    said = headline(moment(done=4, finished=1, failed=2, waiting=1))
    assert said == "1 of 5 finished, 2 failed or diverged, 1 cancelled, 0 running, 1 waiting"


def test_long_names_are_not_cut_on_a_narrow_terminal() -> None:
    names = [f"cpu_50k-attnres_block_n8_query_input_normaliser_sigmoid-s{seed}-lr0.001" for seed in range(20)]
    state = TrialState("running", step=123_456, steps=200_000, tokens_per_second=1e5, eta_seconds=3e4)
    output = io.StringIO()
    console = Console(file=output, width=80, height=24)
    console.print(render(moment(running=tuple((name, state) for name in names)), 24, 80))
    lines = output.getvalue().splitlines()
    assert len(lines) <= 24 and lines[-1].startswith("0 of 20 finished")
    shown = "".join(line.strip("│ ").split()[0].strip("│") for line in lines if line.startswith("│"))
    assert names[0] in shown
    assert any("123,456/200,000" in line for line in lines)
