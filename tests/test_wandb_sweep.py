"""The example of a W&B sweep: the very command line that W&B's agent makes of it is a trial."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_trial import tiny_overrides

from attnres.compose import compose_trial

ROOT = Path(__file__).resolve().parents[1]
SUGGESTED = {"optim.learning_rate": 0.0123456789, "optim.weight_decay": 0.0, "residual": "attnres_block"}


# W&B's own reading of the file and the agent's values. In a process of its own: its client is slow to import,
# and leaves a service behind.
BUILD = """
import json, re, sys
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args, load_sweep_config
config = load_sweep_config(sys.argv[1])
given = create_sweep_command_args({"args": {k: {"value": v} for k, v in json.loads(sys.argv[2]).items()}})
made = {**given, "env": ["/usr/bin/env"], "interpreter": [sys.executable]}
words = []
for part in create_sweep_command(config["command"]):
    macro = re.fullmatch(r"[$][{](\\w+)[}]", part)
    words += made[macro[1]] if macro else [part]
print(json.dumps([sorted(config["parameters"]), words]))
"""


def command_line() -> list[str]:
    """As wandb.wandb_agent puts it together, but for the programs that it calls env and interpreter."""
    file = str(ROOT / "examples" / "wandb_sweep.yaml")
    command = [sys.executable, "-c", BUILD, file, json.dumps(SUGGESTED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    parameters, words = json.loads(done.stdout.splitlines()[-1])
    assert parameters == sorted(SUGGESTED)
    return list(words)


def test_the_agents_words_are_a_trial() -> None:
    words = command_line()
    assert words[:4] == ["/usr/bin/env", sys.executable, "-m", "attnres.train"]
    config = compose_trial(words[4:])
    assert config.optim.learning_rate == 0.0123456789 and config.optim.weight_decay == 0.0
    assert config.residual.rule == "attnres_block" and config.model.name == "cpu_50k"
    assert config.tracking.wandb == "online"


@pytest.mark.slow
def test_the_agents_command_trains_the_run_that_it_was_given(tmp_path: Path) -> None:
    words = command_line()
    suggested = [word for word in words[4:] if word.partition("=")[0] in SUGGESTED]
    assert len(suggested) == 3
    tiny = [word for word in tiny_overrides(tmp_path, steps=8) if not word.startswith("tracking=")]
    command = [
        *words[:4],
        *suggested,
        *tiny,
        "study_name=wandb_sweep",
        "tracking=wandb_online",
        "residual.num_blocks=2",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "WANDB_SWEEP_ID": "abcd1234",
        "WANDB_RUN_ID": "efgh5678",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "is not used" not in done.stderr
    (record,) = (tmp_path / "runs" / "wandb_sweep").glob("*/record.json")
    assert json.loads(record.read_text())["learning_rate"] == 0.0123456789
    assert [path.name for path in record.parent.glob("wandb/offline-run-*/*.wandb")] == ["run-efgh5678.wandb"]
