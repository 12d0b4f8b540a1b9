"""From a run's state to its record. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from attnres.config import to_mapping
from attnres.data.corpus import PackedCorpus
from attnres.notice import warn
from attnres.origin import Origin
from attnres.record import RECORD_FILE, SCHEMA, write_record
from attnres.run_state import RunState
from attnres.status import StatusFile
from attnres.trial import Trial


def make_record(
    trial: Trial,
    corpus: PackedCorpus,
    state: RunState,
    status: str,
    reason: str | None,
    attempt: StatusFile,
) -> dict[str, Any]:
    """The record (schema: attnres.record). Without `timing` it is the same for every run of a trial on one
    machine.
    """
    config, counts = trial.config, trial.counts
    tokens = state.step * trial.batch_tokens
    return {
        "schema": SCHEMA,
        "trial_id": trial.id,
        "name": trial.name,
        "study": config.study_name,
        "status": status,
        "reason": reason,
        "size": config.model.name,
        "rule": config.residual.label(),
        "seed": config.seed,
        "config": to_mapping(config),
        "parameters": {
            **counts.parameters,
            "total": counts.total_parameters,
            "non_embedding": counts.non_embedding_parameters,
        },
        "forward_flops_per_token": dict(counts.forward_flops_per_token),
        "training_flops": {
            convention: flops * tokens for convention, flops in counts.training_flops_per_token().items()
        },
        "tokens": tokens,
        "planned_tokens": trial.tokens,
        "steps": state.step,
        "planned_steps": trial.steps,
        "schedule_complete": state.step == trial.steps,
        "learning_rate": config.optim.learning_rate,
        "data": {
            "fingerprint": corpus.fingerprint,
            "validation_fingerprint": corpus.validation_fingerprint,
            "corpus": config.data.corpus,
            "tokenizer": config.data.tokenizer,
            "train_tokens": corpus.train_tokens,
            "epochs": trial.epochs,
        },
        "validation": state.validation if status == "finished" else None,
        "evaluations": state.evaluations,
        "training": None if status == "failed" else _training(state),
        "environment": dict(state.environment),
        "timing": _timing(state, tokens, attempt),
    }


def record_failure(
    trial: Trial, corpus: PackedCorpus, state: RunState, status: StatusFile, reason: str, origin: Origin
) -> None:
    """A record with status failed. It has no results, and the next run of the trial replaces it."""
    try:
        record = make_record(trial, corpus, state, "failed", reason, status) | {"origin": origin}
        write_record(trial.folder, record)
    except OSError as another:  # most likely the same trouble; the first error is the one to show
        warn(f"{trial.folder / RECORD_FILE}: {another.strerror}: the failure could not be recorded")
    status.end("failed", reason, origin, step=state.step)


def _training(state: RunState) -> dict[str, Any] | None:
    if state.first_loss_nats is None:
        return None
    return {
        "first_loss_nats": state.first_loss_nats,
        "last_loss_nats": state.recent_loss_nats,
        "last_loss_steps": len(state.recent_losses),
    }


def _timing(state: RunState, tokens: int, attempt: StatusFile) -> dict[str, Any]:
    """Seconds over all attempts. Training excludes start-up, evaluation and checkpoints."""
    clock = state.clock
    train_seconds = clock.seconds["train"]
    return {
        **{f"{activity}_seconds": seconds for activity, seconds in clock.seconds.items()},
        "wall_seconds": clock.wall_seconds,
        "tokens_per_second": tokens / train_seconds if train_seconds else None,
        "median_step_seconds": clock.median_step_seconds(),
        "started": datetime.fromtimestamp(attempt.first_started, UTC).isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "attempts": attempt.attempts,
    }


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B's tables show of a run, and the whole record as JSON text.

    As text because W&B would spread a nested value over some hundred columns, and may round long integers.
    """
    validation = record["validation"] or {}
    return {
        "status": record["status"],
        "reason": record["reason"],
        "parameters": record["parameters"]["total"],
        "non_embedding_parameters": record["parameters"]["non_embedding"],
        "total_tokens": record["tokens"],
        "training_flops": record["training_flops"]["total"],
        "final_loss_nats": validation.get("loss_nats"),
        "final_standard_error": validation.get("standard_error"),
        "final_bits_per_byte": validation.get("bits_per_byte"),
        "train_seconds": record["timing"]["train_seconds"],
        "record": json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False),
    }
