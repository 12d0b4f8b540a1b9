"""The trial lock between real processes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from attnres.lock import TrialBusy, TrialLock, is_locked

HOLD = """
import sys, pathlib
from attnres.lock import TrialLock
with TrialLock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


@pytest.mark.parametrize("how", ["return", "kill"])
def test_one_process_at_a_time(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "trial"
    assert not is_locked(folder)
    with hold(folder) as process:
        assert is_locked(folder)
        with pytest.raises(TrialBusy, match=str(process.pid)) as caught, TrialLock(folder):
            pass
        assert caught.value.pid == process.pid
        if how == "kill":
            process.send_signal(signal.SIGKILL)
        else:
            process.communicate("\n")
        process.wait()
        with TrialLock(folder):  # the kernel has let go
            assert is_locked(folder)
    assert not is_locked(folder)


def test_a_child_program_does_not_keep_the_lock(tmp_path: Path) -> None:
    with TrialLock(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with TrialLock(tmp_path):
            assert (tmp_path / "lock").read_text().strip() == str(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_who_looks_keeps_nobody_from_the_trial(tmp_path: Path) -> None:
    """A look holds the lock for an instant: others that look do not see it, who wants to train waits."""
    with TrialLock(tmp_path):
        pass
    look = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    assert not is_locked(tmp_path)
    ends = threading.Timer(0.1, os.close, (look,))
    ends.start()
    with TrialLock(tmp_path):
        ends.join()
        assert is_locked(tmp_path)
