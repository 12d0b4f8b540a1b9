"""The record of a trial: what it was and what came out. The only thing the analysis reads.

One JSON file, written atomically when the trial has ended; docs/record.md has the schema. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnres.errors import RecordError, TornRecordError
from attnres.json_file import Check, is_number, or_null, parse
from attnres.wandb_key import hide

SCHEMA = 1
RECORD_FILE = "record.json"
STATUSES = ("finished", "diverged", "failed")

# Field -> type. Every record has all of them; `reason` is null unless the status is diverged or failed, and
# the results are null for a failed trial.
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "schema": int,
    "trial_id": str,
    "name": str,
    "study": str,
    "status": str,
    "reason": (str, type(None)),
    "size": str,  # config.model.name
    "rule": str,  # label of the rule with its options, unique in a study
    "seed": int,
    "config": dict,  # the whole TrialConfig as a mapping
    "parameters": dict,  # by part, and "total", "non_embedding"
    "forward_flops_per_token": dict,  # by part
    "training_flops": dict,  # of the whole run, by convention of attnres.counts
    "tokens": int,  # trained on; fewer than planned when diverged
    "planned_tokens": int,
    "steps": int,
    "planned_steps": int,
    "schedule_complete": bool,  # the learning rate has decayed to its final value
    "learning_rate": float,
    "data": dict,  # fingerprint, corpus, tokenizer, train_tokens, epochs, validation_fingerprint
    "validation": (dict, type(None)),  # loss_nats, standard_error, bits_per_byte, tokens, windows
    "evaluations": list,  # of {step, tokens, loss_nats, standard_error, bits_per_byte, tokens_evaluated}
    "training": (dict, type(None)),  # loss_nats at the first and the last steps
    "environment": dict,  # python, torch, platform, cpu, threads, device, dtype, commit
    "timing": dict,  # {train,evaluation,wall}_seconds, tokens_per_second, started, ended, attempts
}


def _is_real(value: Any) -> bool:
    """A number, finite or not: the analysis says which trial has a loss that is none. JSON's true is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


# Field -> what each of its values is.
VALUES: Mapping[str, Check] = {
    "parameters": _is_real,
    "forward_flops_per_token": _is_real,
    "training_flops": _is_real,
    "data": _is_scalar,
    "validation": or_null(_is_real),  # a single window has no standard error
    "environment": _is_scalar,
    "timing": _is_scalar,
}
# Of `timing`: finite numbers, or null where they are not known. Whatever else it has is text.
TIMES = ("train_seconds", "evaluation_seconds", "probe_seconds", "wall_seconds", "tokens_per_second")
COUNTS = ("attempts", "peak_memory_bytes")
GROUPS = ("model", "residual", "optim", "schedule", "runtime")  # of the config, where it has them: mappings

# What may differ between two runs of the same trial on one machine.
TIMING_FIELDS = ("timing",)


def check_record(record: Any, where: str) -> dict[str, Any]:
    """Return the record if it follows the schema; else raise RecordError naming the file and the field."""
    if not isinstance(record, dict):
        raise RecordError(f"{where}: not a record (a JSON object is expected)")
    if record.get("schema") != SCHEMA:
        raise RecordError(f"{where}: schema={record.get('schema')!r}: this version reads schema {SCHEMA}")
    for field, kind in FIELDS.items():
        if field not in record:
            raise RecordError(f"{where}: {field}: is missing")
        true_as_number = kind in (int, float) and isinstance(record[field], bool)  # Python counts with it
        if not isinstance(record[field], kind) or true_as_number:
            raise RecordError(f"{where}: {field}={record[field]!r}: wrong type")
    for field, check in VALUES.items():
        for key, value in (record[field] or {}).items():
            if not check(value):
                raise RecordError(f"{where}: {field}.{key}={value!r}: wrong type")
    for key in (*TIMES, *COUNTS):
        value = record["timing"].get(key)
        if value is not None and not (is_number(value) and (key in TIMES or isinstance(value, int))):
            raise RecordError(f"{where}: timing.{key}={value!r}: wrong type")
    for group in GROUPS:
        if not isinstance(record["config"].get(group, {}), dict):
            raise RecordError(f"{where}: config.{group}={record['config'][group]!r}: wrong type")
    if record["status"] not in STATUSES:
        raise RecordError(f"{where}: status={record['status']!r}: one of {', '.join(STATUSES)}")
    if record["status"] == "finished" and (record["validation"] or {}).get("loss_nats") is None:
        raise RecordError(f"{where}: validation.loss_nats: is missing in a finished record")
    return record


def write_record(folder: Path, record: Mapping[str, Any]) -> Path:
    """Check and write `record.json`, atomically and durably."""
    path = folder / RECORD_FILE
    check_record(dict(record), str(path))
    write_text_atomic(path, json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def read_record(path: Path) -> dict[str, Any]:
    """Read and check a record file. Raises RecordError for an absent, torn or foreign one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: no such record") from None
    except UnicodeDecodeError as error:
        raise TornRecordError(f"{path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        record = parse(text)
    except ValueError as error:
        raise TornRecordError(f"{path}: torn or not JSON ({error})") from None
    return check_record(record, str(path))


def read_trial_record(folder: Path) -> dict[str, Any]:
    """The record in a trial's folder. Raises RecordError also for the record of another trial."""
    record = read_record(folder / RECORD_FILE)
    if record["trial_id"] != folder.name:
        why = "belongs to another trial; move it away"
        raise RecordError(f"{folder / RECORD_FILE}: trial_id={record['trial_id']}: {why}")
    return record


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without what may differ between two runs of the same trial on one machine."""
    return {key: value for key, value in record.items() if key not in TIMING_FIELDS}


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader, or a restart after a crash, sees the old content or the new, no part.

    A W&B key in the text is left out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are for the owner only, and these folders are shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(hide(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk shows in write or fsync, which do not know the path
            error.filename = str(path)
        raise
