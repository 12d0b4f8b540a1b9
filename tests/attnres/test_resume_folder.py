"""`python -m attnres.train --resume FOLDER`: a trial from its own folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny_trial import tiny_trial

from attnres import train
from attnres.cli import run_command
from attnres.folder import prepare_folder
from attnres.record import comparable, read_record
from attnres.stop import ask_to_cancel, cancel_asked
from attnres.train import main


def test_a_trial_that_was_cancelled_goes_on_and_ends_as_if_nothing_had_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnres.stop.SECONDS_BETWEEN_LOOKS", 0.0)
    trial, corpus = tiny_trial(tmp_path, steps=30)
    expected = comparable(train.train(trial, corpus))
    shutil.rmtree(trial.folder)
    prepare_folder(trial)
    ask_to_cancel(trial.folder)
    with pytest.raises(train.Cancelled):
        train.train(trial, corpus)
    assert not (trial.folder / "status.json").exists()  # it had not begun
    assert run_command(main, ["--resume", str(trial.folder)]) == 0
    assert not cancel_asked(trial.folder)
    assert "finished" in capsys.readouterr().out
    assert comparable(read_record(trial.folder / "record.json")) == expected
    # Once more: it is done.
    before = (trial.folder / "record.json").stat().st_mtime_ns
    assert run_command(main, ["--resume", os.path.relpath(trial.folder)]) == 0
    assert (trial.folder / "record.json").stat().st_mtime_ns == before


def test_a_moved_runs_folder(tmp_path: Path) -> None:
    trial, _ = tiny_trial(tmp_path, steps=4)
    prepare_folder(trial)
    moved = tmp_path / "elsewhere" / trial.config.study_name / trial.id
    moved.parent.mkdir(parents=True)
    shutil.move(trial.folder, moved)
    assert run_command(main, ["--resume", str(moved)]) == 0
    assert (moved / "record.json").exists() and not trial.folder.exists()


def mistake(folder: Path, *more: str) -> list[str]:
    return ["--resume", str(folder), *more]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial, _ = tiny_trial(tmp_path, steps=4)
    prepare_folder(trial)
    config = (trial.folder / "config.yaml").read_text()
    other = trial.folder.parent / "0123456789ab"
    shutil.copytree(trial.folder, other)
    renamed = tmp_path / "runs" / "another_study" / trial.id
    shutil.copytree(trial.folder, renamed)
    cases = [
        (mistake(tmp_path / "nowhere"), "is not a trial's folder (there is no config.yaml)"),
        (mistake(trial.folder, "seed=3"), "is all that is needed; seed=3 would make another trial"),
        (mistake(other), f"its configuration is trial {trial.id} here"),
        (mistake(renamed), f"config.yaml says study {trial.config.study_name}"),
    ]
    for words, line in cases:
        assert run_command(main, words) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("error: ") == said.count("\n") == 1
    mistyped = config.replace("seed: 0", "seed: a")
    for text, line in (("{", "is torn"), ("[1]", "is not a trial's"), (mistyped, "seed=a: must be")):
        (trial.folder / "config.yaml").write_text(text)
        assert run_command(main, mistake(trial.folder)) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1
