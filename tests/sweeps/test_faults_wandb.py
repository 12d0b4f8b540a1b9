"""A launch whose W&B processes are killed: one warning per trial, the same records."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
from kill_launch import Launch, Outcome, compare, run_undisturbed
from soak import find
from sweeps_support import Workplace

from attnres.metrics import read_rows

SETTINGS = ("study.sizes=[tiny_a]", "budget.tokens=19200", "tracking=wandb_offline")


@pytest.mark.slow
def test_killed_wandb_processes_cost_their_trials_a_warning_each(workplace: Workplace) -> None:
    words = [word for word in workplace.arguments(*SETTINGS) if not word.startswith("runs_dir=")]
    run_undisturbed(workplace.root / "undisturbed", words)
    launch = Launch(workplace.root / "disturbed", words)
    killed: set[int] = set()
    while launch.process.poll() is None:
        for core in set(find(launch, "wandb-core")) - killed:
            time.sleep(0.7)  # until its trial trains
            with suppress(ProcessLookupError):
                os.kill(core, signal.SIGKILL)
            killed.add(core)
        time.sleep(0.05)
    assert launch.process.returncode == 0
    assert len(killed) >= 2
    outcome = Outcome()
    compare(workplace.root / "undisturbed", workplace.root / "disturbed", outcome)
    assert (outcome.compared, outcome.differing) == (2, [])
    for path in (workplace.root / "disturbed").glob("runs/tiny/*/log.txt"):
        log = path.read_text()
        assert log.count("warning: W&B") == 1, log
        assert "Traceback" not in log
        steps = {row["step"] for row in read_rows(path.with_name("metrics.jsonl"))}
        assert max(steps) == 300
