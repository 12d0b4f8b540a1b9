"""A Ray task without Ray."""

from __future__ import annotations

import _thread
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest

from sweeps import ray_job


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler])
def test_a_task_is_interrupted_also_where_a_shell_ignores_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    def interrupted(*_: Any) -> int:
        _thread.interrupt_main()  # as Ray's cancel does; without effect on a signal that is ignored
        time.sleep(0.2)
        return 0

    monkeypatch.setattr(ray_job, "run_attempt", interrupted)
    monkeypatch.chdir(tmp_path)
    usual = signal.signal(signal.SIGINT, before)
    try:
        with pytest.raises(KeyboardInterrupt):
            ray_job.run_task(*cast(Any, (None, None, None, 1)), tmp_path)
    finally:
        signal.signal(signal.SIGINT, usual)
