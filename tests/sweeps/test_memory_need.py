"""Memory of a study's trials: what is known of it, what there is, and the warning before too many start."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path

import pytest
from sweeps_support import Workplace, write

from attnres.cli import run_command
from attnres.record import write_text_atomic
from sweeps import calibration, launch, memory_need, plan, timing
from sweeps.calibration import Calibration
from sweeps.capacity import capacity
from sweeps.machine_memory import Available, available_memory, visible_gpus
from sweeps.study import PlannedTrial, Study

MB = 1_000_000


def remember(study: Study, megabytes: dict[str, int], side_by_side: int) -> None:
    for planned in study.trials:
        if planned.cell in megabytes:
            measured = Calibration(0.1, 0.1, 1.0, megabytes[planned.cell] * MB)
            path = calibration.cache_path(planned, side_by_side)
            write_text_atomic(path, json.dumps(asdict(measured)))


def there_is(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_need, "available_memory", lambda device: Available(megabytes * MB, "a test"))


def test_too_many_at_once_are_named_and_how_many_fit(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("launch.workers=3",)
    study = workplace.study(*words)
    cells = [planned.cell for planned in study.trials]
    remember(study, dict(zip(cells, (400, 500, 600, 700), strict=True)), 3)
    there_is(1800, monkeypatch)
    assert memory_need.memory_warnings(study, calibration.known(study), capacity(study)) == []
    there_is(1799, monkeypatch)
    assert run_command(plan.main, [*workplace.arguments(*words), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (warning,) = data["warnings"]
    assert warning.startswith(
        f"{cells[3]}: 3 trials at once (700 MB each the largest) take 1.8 GB, more than"
    )
    assert warning.endswith("1.8 GB available (a test): launch.workers=2 fits")
    assert [trial["peak_memory_bytes"] for trial in data["trials"]] == [
        400 * MB,
        500 * MB,
        600 * MB,
        700 * MB,
    ]
    assert all(trial["peak_memory_measured"] for trial in data["trials"])
    assert run_command(plan.main, workplace.arguments(*words)) == 0
    out = capsys.readouterr().out
    assert f"warning: {warning}" in out and "700 MB" in out


def test_a_trial_that_cannot_fit_is_warned_of_before_it_starts_without_any_calibration(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there_is(100, monkeypatch)
    words = workplace.arguments("study.sizes=[tiny_a]", "study.rules=[prenorm]")
    monkeypatch.setattr(launch, "open_executor", lambda study: pytest.exit("started"))
    with pytest.raises(pytest.exit.Exception):
        launch.main(words)
    error = capsys.readouterr().err
    assert "warning: tiny_a prenorm: a trial takes at least 300 MB, more than the 100 MB available" in error
    assert "runtime.microbatch_size" in error


def test_finished_trials_need_nothing(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    study = workplace.study("study.sizes=[tiny_a]")
    there_is(1, monkeypatch)
    assert memory_need.memory_warnings(study, {}, capacity(study))
    ended = type("State", (), {"ended": True})()
    monkeypatch.setattr(memory_need, "read_state", lambda folder: ended)
    assert memory_need.memory_warnings(study, {}, capacity(study)) == []


def test_workers_are_counted_as_the_executor_would(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def counted(*words: str) -> tuple[int, bool, int]:
        found = capacity(workplace.study(*words))
        return found.workers, found.here, found.side_by_side

    assert counted("launch.workers=7") == (7, True, 7)
    assert counted("executor=slurm") == (4, False, 1)
    assert counted("executor=slurm", "executor.at_once=3") == (3, False, 1)
    assert counted("executor=slurm", "launch.workers=2") == (2, False, 1)
    assert counted("executor=ray", "executor.address=auto") == (4, False, 1)
    monkeypatch.setattr("sweeps.capacity.available_cores", lambda: 6)
    assert counted("executor=ray", "executor.cpus=2") == (3, True, 3)
    words = [*workplace.arguments("executor=slurm", "executor.memory=200M"), "--no-calibrate"]
    assert run_command(plan.main, words) == 0
    out = capsys.readouterr().out
    assert "up to 4 at once" in out
    assert "executor=slurm: times and memory are of this machine, and the cluster's nodes may differ" in out
    assert "a trial takes at least 300 MB, more than executor.memory=200M: its job would be killed" in out


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_bounds_the_memory(tmp_path: Path, version: int) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory("cpu", tmp_path) == Available(8000 * 1024, "this machine")
    if version == 2:
        write(tmp_path / "proc/self/cgroup", "0::/user/job\n")
        outer, inner = tmp_path / "sys/fs/cgroup/user", tmp_path / "sys/fs/cgroup/user/job"
        limit, used = "memory.max", "memory.current"
        write(inner / limit, "max\n")
        write(outer / "memory.stat", "anon 1\ninactive_file 500000\n")
    else:
        write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/user\n3:memory:/user/job\n")
        outer, inner = (tmp_path / "sys/fs/cgroup/memory" / part for part in ("user", "user/job"))
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        write(inner / limit, "9223372036854771712\n")
        write(outer / "memory.stat", "inactive_file 7\ntotal_inactive_file 500000\n")
    write(inner / used, "10\n")
    write(outer / limit, "4000000\n")
    write(outer / used, "3000000\n")
    bound = available_memory("cpu", tmp_path)
    assert bound == Available(1_500_000, "its memory limit of 0.0 GB")
    write(outer / used, "6000000\n")
    assert available_memory("cpu", tmp_path) == Available(0, "its memory limit of 0.0 GB")


def test_where_nothing_says_there_is_no_warning(
    tmp_path: Path, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_memory("cpu", tmp_path) is None
    monkeypatch.setattr(memory_need, "available_memory", lambda device: None)
    study = workplace.study()
    assert memory_need.memory_warnings(study, {}, capacity(study)) == []


def test_memory_of_the_gpu_that_a_trial_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["0, GPU-aa, Some GPU, 1000", "1, GPU-bb, Other GPU, 2000"]
    script = write(tmp_path / "bin/nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    for visible, name, free in (
        (None, "Some GPU", 1000),
        ("1,0", "Other GPU", 2000),
        ("GPU-bb", "Other GPU", 2000),
    ):
        visible_gpus.cache_clear()
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert available_memory("cuda") == Available(free * 2**20, f"GPU {name}")
    visible_gpus.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert available_memory("cuda") is None
    visible_gpus.cache_clear()


def test_calibration_says_what_it_waits_for(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    go, heard = Event(), []

    def measure(planned: object, config_dir: object, children: object) -> tuple[Calibration, None]:
        go.wait(30)
        return Calibration(0.25, 0.5, 2.0, 400 * MB), None

    def say(line: str) -> None:
        heard.append(line)
        if "; timing " in line:
            go.set()

    monkeypatch.setattr(timing, "_measure", measure)
    monkeypatch.setattr(timing, "SAY_SECONDS", 0.02)
    study = workplace.study("study.sizes=[tiny_a]", "launch.workers=2")
    timing.calibrate(study, say)
    assert heard[1].endswith("s; timing tiny_a prenorm, tiny_a attnres_block_n2")
    assert heard[1].startswith("  0 of 2 after ")
    assert heard[-1].startswith("  2 of 2: tiny_a ") and heard[-1].endswith("250 ms a step, 400 MB")
    assert calibration.known(study)["tiny_a prenorm"].peak_memory_bytes == 400 * MB


def test_what_would_not_fit_is_not_timed(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes, two rules, two at once: bounds of 300 MB and a little; the sums decide."""
    study, heard, timed = workplace.study("launch.workers=2"), list[str](), list[str]()
    needs = {p.cell: memory_need.need(p, {}).bytes for p in study.trials}
    largest, second, third, _ = sorted(needs, key=lambda cell: -needs[cell])

    def measure(planned: PlannedTrial, *_: object) -> tuple[Calibration, None]:
        timed.append(planned.cell)
        return Calibration(0.25, 0.5, 2.0, 400 * MB), None

    monkeypatch.setattr(timing, "_measure", measure)
    for room, too_large in (
        (needs[largest] + needs[second], []),
        (needs[largest] + needs[second] - 1, [largest]),
        (needs[second] + needs[third] - 1, [largest, second]),
        (1, list(needs)),
    ):
        monkeypatch.setattr(timing, "available_memory", lambda _, room=room: Available(room, "a test"))
        timed.clear()
        heard.clear()
        found = timing.calibrate(study, heard.append, again=True)
        assert set(timed) == set(needs) - set(too_large)
        assert set(found) == set(needs)  # the first round's are kept
        said = [line for line in heard if line.startswith("not timed: ")]
        assert len(said) == bool(too_large)
        if too_large:
            assert said[0].startswith(f"not timed: {largest}") and ("2 at once" in said[0]) == (room > 1)
            assert said[0].endswith("are available (a test)")
            assert ("3 other shapes" in said[0]) == (room == 1)
    # What was known stays known, where it cannot be timed again.
    monkeypatch.setattr(timing, "available_memory", lambda _: Available(1, "a test"))
    remember(study, {largest: 300}, 2)
    timed.clear()
    assert timing.calibrate(study, heard.append, again=True)[largest].seconds_per_step == 0.1
    assert timed == []
    monkeypatch.setattr(timing, "available_memory", lambda _: None)  # nothing says
    assert set(timing.calibrate(study, heard.append, again=True)) == set(needs)


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.09, False), (0.11, True)])
def test_a_busy_machine_is_named(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, share: float | None, warned: bool
) -> None:
    study, heard = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]"), list[str]()
    measured = Calibration(0.25, 0.5, 2.0, 400 * MB)
    monkeypatch.setattr(timing, "_measure", lambda *_: (measured, share))
    timing.calibrate(study, heard.append)
    warnings = [line for line in heard if line.startswith("warning: tiny_a prenorm: ")]
    assert len(warnings) == warned
    if warned:
        assert "11%" in warnings[0] and "--recalibrate" in warnings[0]


def test_the_bound_is_plain_arithmetic(workplace: Workplace) -> None:
    from attnres.peak_memory import PROCESS_BYTES, training_bytes_at_least

    (planned,) = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]").trials
    trial = planned.trial
    # Width, inner width and MLP 8; 2 blocks; 2 sequences of 32 tokens; 257 words or so.
    attention, mlp = 2 * 8 + 6 * 8, 2 * 8 + 4 * 8
    activations = 64 * (4 * 2 * (attention + mlp) + 8 * trial.vocabulary)
    assert training_bytes_at_least(trial) == PROCESS_BYTES + 12 * trial.counts.total_parameters + activations
