"""Files by which the processes of a trial tell the trial's own process how they ended. Torch-free.

They are in a temporary folder of that process, beside the file by which it asks them to stop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnres.record import write_text_atomic

CONFIG_FILE, OUTCOME_FILE, AGENT_FILE = "config.json", "outcome.json", "agent.json"
FAILURE_FILES = "failure-*.json"


def failure_file(rank: int) -> str:
    return FAILURE_FILES.replace("*", str(rank))


def write(folder: Path, name: str, message: Any) -> None:
    write_text_atomic(folder / name, json.dumps(message))


def read(folder: Path, name: str) -> Any:
    """The message, or None if there is none."""
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
