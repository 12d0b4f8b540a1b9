"""W&B through its real client, and what its troubles cost: nothing that is local."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_trial import tiny_overrides, tiny_trial

from analysis.wandb_offline import read_folder
from attnres import learner, tracking, wandb_service
from attnres.errors import UserError
from attnres.lock import TrialLock
from attnres.metrics import METRICS_FILE, read_rows
from attnres.record import read_record
from attnres.tracking import open_wandb
from attnres.train import train
from attnres.wandb_key import has_key
from attnres.wandb_service import choose_mode

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_wandb_settings_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)


def command(root: Path, *more: str, steps: int = 20) -> list[str]:
    """Tracked as by default, unless `more` says how."""
    overrides = [word for word in tiny_overrides(root, *more, steps=steps) if word != "tracking=none"]
    return [sys.executable, "-m", "attnres.train", *overrides]


def run(root: Path, *more: str, steps: int = 20, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(root, *more, steps=steps),
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
    )


def trial_folders(root: Path) -> list[Path]:
    return [path.parent for path in sorted(root.glob("runs/single/*/record.json"))]


def inspect(run_folder: Path) -> list[dict[str, Any]]:
    """A local run through W&B's own reader."""
    (file,) = run_folder.glob("*.wandb")
    executable = Path(sys.executable).with_name("wandb")
    done = subprocess.run(
        [executable, "leet", "inspect", "--json", file], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_mode("offline") == "offline"
    for variable, mode in [("online", "online"), ("dryrun", "offline"), ("disabled", "disabled")]:
        monkeypatch.setenv("WANDB_MODE", variable)
        assert choose_mode("offline") == mode
    monkeypatch.setenv("WANDB_MODE", "of-line")
    with pytest.raises(UserError, match="WANDB_MODE=of-line"):
        choose_mode("offline")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert choose_mode("online") == "disabled"


def test_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not has_key()
    (tmp_path / "home").mkdir()
    for host in ("api.wandb.ai", "api.forge.coreweave.com"):  # as clients of different versions write it
        (tmp_path / "home" / ".netrc").write_text(f"machine {host} login user password secret\n")
        assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert has_key()


def test_trials_of_one_process_are_runs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four trials by -m; a mistake in two of them does not stop the others, which Hydra alone would do. A
    key in the command line, which Hydra writes down, is in no file.
    """
    key = "fedcba9876543210" * 3
    monkeypatch.setenv("WANDB_API_KEY", key)
    done = run(tmp_path, "-m", "seed=0,1", "model.heads=2,3", f"tracking.tags=[first,{key}]", steps=12)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "runs" / "single" / "multirun.yaml") in files
    assert not [path for path in files if key.encode() in path.read_bytes()]
    assert done.returncode == 2
    assert "4 trials: 2 finished, 2 with a mistake in the settings" in done.stdout
    errors = [line for line in done.stderr.splitlines() if not line.startswith("packing")]
    assert errors == ["error: model.width=16: is not divisible by model.heads=3"] * 2
    assert not (tmp_path / "multirun.yaml").exists()
    folders = trial_folders(tmp_path)
    assert len(folders) == 2
    for folder in folders:
        (wandb_run,) = (folder / "wandb").glob("offline-run-*")
        assert wandb_run.name.endswith(folder.name)
        assert (wandb_run / f"run-{folder.name}.wandb").stat().st_size > 500
    assert not list((tmp_path / "home").glob("**/*wandb*"))


def test_a_folder_that_wandb_cannot_use_costs_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial, corpus = tiny_trial(tmp_path, "tracking=wandb_offline", steps=5)
    trial.folder.mkdir(parents=True)
    (trial.folder / "wandb").write_text("a file where a folder should be")
    assert train(trial, corpus)["status"] == "finished"
    assert len(re.findall("warning: W&B", capsys.readouterr().err)) == 1
    assert read_rows(trial.folder / METRICS_FILE)[-1]["step"] == 5


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_its_process_starts_while_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The model is built only once W&B is being set up (or, if it is disabled, was not in half a second)."""
    started, seen = threading.Event(), []
    set_up, build = wandb_service.set_up, learner.Learner.__init__

    def noted(folder: Path, mode: str) -> Path:
        started.set()
        return set_up(folder, mode)

    def waiting(self: learner.Learner, *arguments: Any) -> None:
        seen.append(started.wait(10 if mode == "offline" else 0.5))
        build(self, *arguments)

    monkeypatch.setattr(wandb_service, "set_up", noted)
    monkeypatch.setattr(learner.Learner, "__init__", waiting)
    monkeypatch.setenv("WANDB_MODE", mode)
    trial, corpus = tiny_trial(tmp_path, "tracking=wandb_offline", steps=2)
    assert train(trial, corpus)["status"] == "finished"
    assert seen == [mode == "offline"]
    assert bool(list(trial.folder.glob("wandb/offline-run-*/*.wandb"))) == (mode == "offline")


def test_the_training_does_not_wait_for_it_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's process is held up until three steps are trained; its run still has the rows of all of them. The
    time that it takes to open the run then is none of the training's.
    """
    third, waited, opened_at = threading.Event(), [], []
    set_up, step, open_run = wandb_service.set_up, learner.Learner.step, tracking.open_wandb

    def held(folder: Path, mode: str) -> Path:
        if threading.current_thread() is not threading.main_thread():
            waited.append(third.wait(10))
        return set_up(folder, mode)

    def counted(self: learner.Learner, number: int, *batch: Any) -> learner.StepResult:
        if number == 3:
            third.set()
        return step(self, number, *batch)

    def slowly(*arguments: Any) -> tracking.WandbRun | None:
        opened_at.append(len(read_rows(trial.folder / METRICS_FILE)))
        time.sleep(0.5)
        return open_run(*arguments)

    monkeypatch.setattr(wandb_service, "set_up", held)
    monkeypatch.setattr(learner.Learner, "step", counted)
    monkeypatch.setattr(tracking, "open_wandb", slowly)
    trial, corpus = tiny_trial(tmp_path, "tracking=wandb_offline", "runtime.log_every_steps=1", steps=6)
    record = train(trial, corpus)
    assert (record["status"], waited) == ("finished", [True])
    assert opened_at[0] >= 2 and record["timing"]["startup_seconds"] >= 0.5
    (logged,) = read_folder(trial.folder)
    rows = read_rows(trial.folder / METRICS_FILE)
    assert {row["_step"] for row in logged.rows()} == {row["step"] for row in rows} >= {1, 2, 3, 6}
    assert logged.summary["status"] == "finished"


def test_a_trial_that_fails_at_once_leaves_its_folder_when_wandb_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is free then: another process may train it, or remove the folder."""
    started, events = threading.Event(), []

    def slow(folder: Path, mode: str) -> Path:
        started.set()
        time.sleep(0.2)
        events.append("set up")
        return folder

    def fails(self: learner.Learner, *arguments: Any) -> None:
        started.wait(10)
        raise RuntimeError("no room for the model")

    unlock = TrialLock.__exit__
    monkeypatch.setattr(wandb_service, "set_up", slow)
    monkeypatch.setattr(learner.Learner, "__init__", fails)
    monkeypatch.setattr(
        TrialLock, "__exit__", lambda self, *error: (events.append("unlocked"), unlock(self, *error))[1]
    )
    trial, corpus = tiny_trial(tmp_path, "tracking=wandb_offline", steps=2)
    with pytest.raises(RuntimeError, match="no room"):
        train(trial, corpus)
    assert events == ["set up", "unlocked"]


def test_where_no_thread_can_be_started_wandb_starts_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    trial, _ = tiny_trial(tmp_path, "tracking=wandb_offline", steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        wandb_service.start_service(trial)
    wandb_service.wait_for_start()


def test_no_key_means_offline_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided before W&B is asked, which would wait at a prompt. The blocked folder stops it."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_RUN_ID", "one-for-all")
    trial, _ = tiny_trial(tmp_path, "tracking=wandb_offline")
    trial.folder.mkdir(parents=True)
    (trial.folder / "wandb").write_text("a file where a folder should be")
    assert open_wandb(trial, trial.folder, attempt=1) is None
    first, second, third = capsys.readouterr().err.splitlines()
    assert "no API key" in first and "offline" in first and "WANDB_RUN_ID" in second
    assert "W&B (offline)" in third


@pytest.mark.slow
def test_wandb_reads_back_what_was_logged(tmp_path: Path) -> None:
    done = run(tmp_path, "seed=3", "study_name=single", "tracking.tags=[ladder]", WANDB_PROJECT="users-own")
    assert done.returncode == 0, done.stderr
    (folder,) = trial_folders(tmp_path)
    record = read_record(folder / "record.json")
    items = inspect(next((folder / "wandb").glob("offline-run-*")))
    (begin,) = [item["run"] for item in items if item["type"] == "run"]
    assert begin["project"] == "users-own"  # the environment wins
    assert (begin["run_group"], begin["job_type"]) == ("single", "cpu_50k")
    assert begin["display_name"] == record["name"] and begin["run_id"] == record["trial_id"]
    assert begin["tags"] == ["ladder"]
    assert begin["config"]["update"]["seed"] == 3
    assert begin["config"]["update"]["model"]["width"] == 16
    metrics = [item["metric"] for item in items if item["type"] == "metric"]
    assert {"name": "tokens", "options": {"defined": True}} in metrics
    assert any(metric.get("step_metric") == "tokens" for metric in metrics)

    history = {
        item["history"]["step"].get("num", 0): item["history"]["item"]
        for item in items
        if item["type"] == "history"
    }
    rows = read_rows(folder / METRICS_FILE)
    assert sorted(history) == sorted({row["step"] for row in rows})
    for row in rows:
        name = {"train": "train/loss_nats", "evaluation": "validation/loss_nats"}[row["kind"]]
        assert history[row["step"]][name] == row["loss_nats"]
        assert history[row["step"]]["tokens"] == row["tokens"]
    summary: dict[str, Any] = {}
    for item in items:
        if item["type"] == "summary":
            summary |= item["summary"].get("update", {})
    assert summary["status"] == "finished"
    assert summary["final_loss_nats"] == record["validation"]["loss_nats"]
    assert summary["training_flops"] == record["training_flops"]["total"]
    (end,) = [item["exit"] for item in items if item["type"] == "exit"]
    assert end.get("exit_code", 0) == 0


@pytest.mark.slow
def test_a_diverged_trial_is_no_success_in_wandb(tmp_path: Path) -> None:
    done = run(tmp_path, "optim.learning_rate=1e30", "optim.grad_clip=null", "schedule.warmup_fraction=0")
    assert done.returncode == 3, done.stderr
    (folder,) = trial_folders(tmp_path)
    items = inspect(next((folder / "wandb").glob("offline-run-*")))
    (end,) = [item["exit"] for item in items if item["type"] == "exit"]
    assert end["exit_code"] == 3


@pytest.mark.slow
def test_a_dead_wandb_process_costs_one_warning(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "runtime.log_every_steps=1", steps=400),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    core = None
    while core is None and process.poll() is None:
        time.sleep(0.02)
        started = list(tmp_path.glob("runs/single/*/metrics.jsonl"))
        if started and started[0].stat().st_size > 1000:
            core = _child_named(process.pid, "wandb-core")
    assert core is not None, "W&B's process was not found"
    os.kill(core, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("warning: W&B") == 1 and "Traceback" not in err
    (folder,) = trial_folders(tmp_path)
    assert len([row for row in read_rows(folder / METRICS_FILE) if row["kind"] == "train"]) == 400


def _child_named(parent: int, name: str) -> int | None:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(fields["PPid"]) == parent and name in (status.parent / "cmdline").read_text():
                return int(status.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


@pytest.mark.slow
def test_no_network_means_offline_with_a_warning(tmp_path: Path) -> None:
    with socket.socket() as closed:  # a port where nothing listens
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    key = "0123456789" * 4
    start = time.monotonic()
    done = run(
        tmp_path,
        "tracking=wandb_online",
        "tracking.init_timeout_seconds=5",
        WANDB_API_KEY=key,
        WANDB_BASE_URL=url,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: W&B (online)") == 1 and "offline" in done.stderr
    assert time.monotonic() - start < 100
    (folder,) = trial_folders(tmp_path)
    assert list((folder / "wandb").glob("offline-run-*"))
    for file in folder.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
    assert key not in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("size", ["100k", "300k"], ids=["full at the start", "full during the run"])
def test_a_full_disk_below_wandb_costs_one_warning(tmp_path: Path, size: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", small], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        done = run(tmp_path, "runtime.log_every_steps=1", steps=800, WANDB_DIR=str(small))
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: W&B") == 1 and "No space left" in done.stderr
    assert "Logging error" not in done.stderr
    (folder,) = trial_folders(tmp_path)
    assert len([row for row in read_rows(folder / METRICS_FILE) if row["kind"] == "train"]) == 800
