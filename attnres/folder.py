"""The folder of a trial before and after a run. Torch-free; the caller holds the trial's lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from attnres.config import to_mapping
from attnres.errors import TornRecordError
from attnres.notice import warn
from attnres.record import RECORD_FILE, read_trial_record, write_text_atomic
from attnres.trial import Trial

CONFIG_FILE = "config.yaml"
CHECKPOINT_FILE = "checkpoint.pt"
WEIGHTS_FILE = "weights.pt"


def finished_record(folder: Path) -> dict[str, Any] | None:
    """The record of a trial that needs no more training: finished or diverged.

    A torn record is moved aside, with a warning. Raises RecordError for one of another schema: what it holds
    must not be overwritten unseen.
    """
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    try:
        record = read_trial_record(folder)
    except TornRecordError as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        warn(f"{error}; it is now {aside.name}, and the trial runs again")
        return None
    if record["status"] == "failed":
        return None
    (folder / CHECKPOINT_FILE).unlink(missing_ok=True)  # the last run may have been killed just before this
    return record


def prepare_folder(trial: Trial) -> None:
    """Write config.yaml; remove the record of a failed attempt and what kills left half written."""
    for leftover in trial.folder.glob(".*.tmp"):  # names of atomic writes
        leftover.unlink(missing_ok=True)
    (trial.folder / RECORD_FILE).unlink(missing_ok=True)
    text = yaml.safe_dump(to_mapping(trial.config), sort_keys=False, allow_unicode=True)
    write_text_atomic(trial.folder / CONFIG_FILE, text)
