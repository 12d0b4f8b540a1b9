"""What the tests on Slurm and Ray share: logs, processes of trials, records beside those of this machine."""

from __future__ import annotations

from pathlib import Path

from fault_support import results
from sweeps_support import Workplace, run_study

from attnres.status import read_status
from sweeps.executor import LocalExecutor
from sweeps.study import Study


def log(workplace: Workplace) -> str:
    return (workplace.root / "launch.log").read_text()


def trial_pid(folder: Path) -> int:
    status = read_status(folder)
    assert status is not None
    return int(status["pid"])


def parents(pid: int) -> list[int]:
    """A process and all its parents, nearest first."""
    found = []
    while pid > 1:
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_records_as_on_this_machine(workplace: Workplace, study: Study, *more: str) -> None:
    """Of a study whose trials have all finished, beside an undisturbed one; apart from timing."""
    local = workplace.study(*more, f"runs_dir={workplace.root / 'local'}")
    run_study(local, LocalExecutor(1, 20))
    assert results(study) == results(local)
