"""Reports from W&B's local files: a tiny study trained with the real client, then read from its runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sweeps_support import SIZE, Workplace, write
from tiny_trial import tiny_overrides

from analysis.load import load_study
from analysis.report import main
from analysis.wandb_offline import (
    BLOCK,
    CHUNK,
    FILE_HEADER,
    FIRST,
    FULL,
    LAST,
    MIDDLE,
    BrokenFile,
    read_folder,
    read_log,
    read_run,
)
from analysis.wandb_runs import history_fault, outcome_of
from analysis.wandb_source import load_wandb
from attnres.cli import run_command
from attnres.errors import UserError
from attnres.record import read_trial_record
from attnres.train import train
from sweeps.study import Study, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """3 sizes x 2 rules, trained one after the other in this process, with W&B offline."""
    root = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(root / "home"))
        place = Workplace(root)
        write(place.configs / "model" / "tiny_c.yaml", SIZE.format(name="tiny_c", width=32))
        sizes = "study.sizes=[tiny_a,tiny_b,tiny_c]"
        study = place.study(sizes, "tracking=wandb_offline", "budget.tokens=1280", "runtime.progress=none")
        write_study(study)
        for planned in study.trials:
            assert train(planned.trial, planned.corpus)["status"] == "finished"
        yield study


@pytest.fixture
def runs(study: Study, tmp_path: Path) -> Path:
    """The W&B folders of the study, and nothing else of it."""
    for planned in study.trials:
        shutil.copytree(
            planned.trial.folder / "wandb", tmp_path / "runs" / planned.trial.id / "wandb", symlinks=True
        )
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("*.jsonl"))
    return tmp_path / "runs"


def run_file(runs: Path, study: Study, cell: str) -> Path:
    (planned,) = [planned for planned in study.trials if planned.cell == cell]
    (path,) = (runs / planned.trial.id).rglob("*.wandb")
    return path


def refusal(source: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_wandb(f"wandb:{source}", **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_report_of_the_runs_is_that_of_the_records(
    study: Study, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = load_study(study.folder.parent, "tiny")
    logged = load_wandb(f"wandb:{runs}")
    pd.testing.assert_frame_equal(logged.table, records.table, check_exact=True)
    assert (logged.name, logged.rules, logged.notes) == (records.name, records.rules, records.notes)
    out = tmp_path / "out"
    assert run_command(main, [f"source=wandb:{runs}", f"out={out}", "draws=100"]) == 0
    assert run_command(main, ["study=tiny", f"runs_dir={study.folder.parent}", "draws=100"]) == 0
    first, second = capsys.readouterr().out.splitlines()[::2]
    assert first == second and "attnres_block_n2 against prenorm" in first
    results = [json.loads((folder / "report" / "results.json").read_text()) for folder in (out, study.folder)]
    for result in results:
        del result["how"]
    assert results[0] == results[1]
    assert (out / "report" / "training_curves.png").is_file()
    metrics = (study.trials[0].trial.folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, metrics) if row["kind"] == "train"]
    assert logged.curves is not None
    assert logged.curves[study.trials[0].trial.id] == (
        [row["tokens"] for row in rows],
        [row["loss_nats"] for row in rows],
    )


def test_our_reader_reads_what_wandbs_own_does(study: Study, runs: Path) -> None:
    path = run_file(runs, study, "tiny_b attnres_block_n2")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No such command" in done.stderr:
        pytest.skip("this version of wandb has no `leet inspect`")
    items = [json.loads(line) for line in done.stdout.splitlines()]
    run = read_run(path)
    theirs = [item["history"]["item"] for item in items if item["type"] == "history"]
    assert [dict(row) for row in run.rows()] == theirs
    (begin,) = [item["run"] for item in items if item["type"] == "run"]
    assert begin["config"]["update"] == run.config
    assert (begin["display_name"], begin["run_group"]) == (run.name, run.group) and run.group == "tiny"
    summary: dict[str, Any] = {}
    for item in items:
        if item["type"] == "summary":
            summary |= item["summary"].get("update", {})
    ours = {key: value for key, value in run.summary.items() if key != "_wandb"}
    assert ours == {key: value for key, value in summary.items() if not key.startswith("_wandb")}


def test_a_cut_file_is_torn(study: Study, runs: Path) -> None:
    path = run_file(runs, study, "tiny_a prenorm")
    whole = path.read_bytes()
    path.write_bytes(whole[:-4000])
    text = refusal(runs)
    assert "unreadable: 1 W&B run: " in text and str(path) in text and "is cut off" in text
    assert "--allow torn" in text
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    assert "is damaged at byte" in refusal(runs)
    data = load_wandb(f"wandb:{runs}", allow=["torn"])
    assert len(data.table) == 5 and [line[:5] for line in data.let_pass] == ["torn:"]
    path.write_bytes(b"")
    assert "is empty" in refusal(runs)
    path.unlink()
    assert "1 of 6 trials have no record: tiny_a-prenorm-s0" in refusal(runs)


def write_log(path: Path, messages: list[Any]) -> None:
    """A run file of these messages; shorter together than a block."""
    body = b""
    for message in messages:
        data = message.SerializeToString()
        body += CHUNK.pack(zlib.crc32(bytes([FULL]) + data), len(data), FULL) + data
    path.write_bytes(FILE_HEADER + body)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_step", '"x"'),
        ("_step", "null"),
        ("_step", "[1]"),
        ("_step", "NaN"),
        ("_step", "1e400"),
        ("loss", "[" * 10_000 + "]" * 10_000),
    ],
)
def test_a_history_of_another_kind_breaks_its_run_alone(tmp_path: Path, key: str, value: str) -> None:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    record = messages.Record()
    item = record.history.item.add()
    item.key, item.value_json = key, value
    begin = messages.Record()
    begin.run.display_name = "odd"
    write_log(tmp_path / "run-1.wandb", [begin, record])
    run = read_run(tmp_path / "run-1.wandb")
    assert run.name == "odd" and "cannot read" in str(run.broken)


def test_a_folder_with_the_name_of_a_run_is_torn(study: Study, runs: Path) -> None:
    (runs / "run-folder.wandb").mkdir()
    (runs / "run-gone.wandb").symlink_to(runs / "nowhere")
    assert "unreadable: 2 W&B runs: " in refusal(runs)
    assert len(load_wandb(f"wandb:{runs}", allow=["torn"]).table) == 6


def test_the_log_survives_no_flipped_bit_and_no_cut(study: Study, runs: Path) -> None:
    """Every prefix of a run file gives its first messages and then an error, or is whole."""
    data = run_file(runs, study, "tiny_a prenorm").read_bytes()
    messages = list(read_log(data))
    whole = 0
    for end in range(7, len(data), 97):
        found = []
        try:
            for message in read_log(data[:end]):
                found.append(message)
            whole += 1
        except BrokenFile:
            pass
        assert found == messages[: len(found)] and len(found) < len(messages)
    assert whole < 20
    for place in range(7, len(data), 997):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(BrokenFile):
            list(read_log(bytes(damaged)))


def test_a_message_over_several_blocks(study: Study, runs: Path) -> None:
    """A record with many evaluations is longer than the 32 KiB of a block."""

    def chunk(kind: int, data: bytes) -> bytes:
        return CHUNK.pack(zlib.crc32(bytes([kind]) + data), len(data), kind) + data

    message = bytes(range(256)) * 300
    room = BLOCK - len(FILE_HEADER) - CHUNK.size
    parts = [message[:room], message[room : room + BLOCK - CHUNK.size], message[room + BLOCK - CHUNK.size :]]
    log = FILE_HEADER + b"".join(
        chunk(kind, part) for kind, part in zip((FIRST, MIDDLE, LAST), parts, strict=True)
    )
    log += chunk(FULL, b"next")
    assert list(read_log(log)) == [message, b"next"]


def test_folders_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, [f"source=wandb:{tmp_path}"]) == 2
    assert "there is no W&B run" in capsys.readouterr().err
    assert run_command(main, [f"source=wandb:{tmp_path / 'a' / 'b'}"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert run_command(main, ["source=wandb:"]) == 2
    assert "name a folder or entity/project" in capsys.readouterr().err


def test_names_of_runs(study: Study, runs: Path) -> None:
    found = read_folder(runs)
    assert sorted(run.name for run in found) == sorted(planned.trial.name for planned in study.trials)
    assert {run.broken for run in found} == {None}
    assert "no W&B run" in refusal(runs / study.trials[0].trial.id / "wandb" / "cache")
    assert "no run is of it; the studies are tiny" in refusal(runs, study="other")
    assert "of 0 runs none was" in refusal(runs, group="other")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_and_resumed_trial_is_one_history(tmp_path: Path, how: signal.Signals) -> None:
    """Two attempts are two run files; joined by the trial's id they have every row of metrics.jsonl."""
    settings = ("tracking=wandb_offline", "runtime.log_every_steps=5", "runtime.checkpoint_seconds=0.5")
    command = [sys.executable, "-m", "attnres.train", *tiny_overrides(tmp_path, *settings, steps=1500)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    while process.poll() is None and not list(tmp_path.glob("runs/single/*/checkpoint.pt")):
        time.sleep(0.05)
    process.send_signal(how)
    assert process.wait(60) != 0
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True, cwd=tmp_path)
    (folder,) = tmp_path.glob("runs/single/*/")
    outcome = outcome_of(read_folder(tmp_path))
    assert [run.attempt for run in outcome.attempts] == [1, 2]
    assert outcome.record == read_trial_record(folder)
    if how == signal.SIGTERM:
        rows = outcome.history()
        assert history_fault(outcome, rows) is None
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = {row["step"]: row["loss_nats"] for row in metrics if row["kind"] == "train"}
        assert {row["_step"]: row["train/loss_nats"] for row in rows if "train/loss_nats" in row} == losses
