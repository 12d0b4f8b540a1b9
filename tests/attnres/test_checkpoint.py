"""Checkpoints: what is saved comes back, and what cannot be read is never run and never lost."""

from __future__ import annotations

import hashlib
import io
import pickle
import resource
from pathlib import Path

import pytest
import torch

from attnres.checkpoint import Checkpoints
from attnres.errors import UserError

STATE = {"learner": {"weights": torch.randn(1000)}, "run": {"step": 3, "losses": [1.5], "validation": None}}


def test_round_trip_and_remove(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "abc")
    assert checkpoints.load() is None
    assert checkpoints.save(STATE)
    loaded = checkpoints.load()
    assert loaded is not None and loaded["run"] == STATE["run"]
    assert torch.equal(loaded["learner"]["weights"], STATE["learner"]["weights"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    checkpoints.remove()
    assert checkpoints.load() is None


class Unsafe:
    def __reduce__(self) -> tuple[type[Path.touch], tuple[Path]]:
        return Path.touch, (Path("was_run"),)


class Odd:
    """What torch allows to be called, with arguments that it does not take."""

    def __reduce__(self) -> tuple[type[set[int]], tuple[int, int]]:
        return set, (1, 2)


def signed(content: bytes) -> bytes:
    """As `Checkpoints` writes it: what is wrong with this content is not a bit that the disk has lost."""
    return hashlib.sha256(content).digest() + content


def test_no_flipped_bit_is_read_as_another_weight(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "abc")
    checkpoints.save(STATE)
    whole = checkpoints.path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 100)):
        checkpoints.path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert checkpoints.load() is None, place
    checkpoints.path.write_bytes(whole)
    assert checkpoints.load() is not None


@pytest.mark.parametrize(
    "damage", ["torn", "garbage", "empty", "one byte", "unsafe", "foreign", "older", "odd"]
)
def test_damage_is_moved_aside(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(tmp_path, "abc")
    checkpoints.save(STATE)
    whole = checkpoints.path.read_bytes()
    foreign = io.BytesIO()
    torch.save({"some": "thing"}, foreign)
    older = io.BytesIO()
    torch.save({"format": 1, "trial_id": "abc", **STATE}, older)
    content = {
        "torn": whole[: len(whole) // 2],
        "garbage": b"not a checkpoint",
        "empty": b"",
        "one byte": b"a",
        "foreign": signed(foreign.getvalue()),
        "older": signed(older.getvalue()),
        "odd": signed(pickle.dumps(Odd(), protocol=2)),
        "unsafe": signed(pickle.dumps(Unsafe(), protocol=2)),
    }[damage]
    checkpoints.path.write_bytes(content)
    assert checkpoints.load() is None
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "checkpoint.pt" in warning and "checkpoint.damaged" in warning
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.damaged"]


def test_another_trials_checkpoint_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path, "abc").save(STATE)
    with pytest.raises(UserError, match="belongs to trial abc, not to xyz"):
        Checkpoints(tmp_path, "xyz").load()
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(tmp_path, "abc")
    checkpoints.save(STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, hard)
    )  # as a full disk: no file may grow past 1,000 bytes
    try:
        assert not checkpoints.save({**STATE, "run": {"step": 4}})
        assert not checkpoints.save({**STATE, "run": {"step": 5}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("warning") == 1
    loaded = checkpoints.load()
    assert loaded is not None and loaded["run"]["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert checkpoints.save({**STATE, "run": {"step": 6}})
