"""Planned trials and their records -> rows of one tidy table; which of them are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.gate import StudyError, check_losses, name_some
from analysis.settings import time_columns
from attnres.counts import CONVENTIONS
from attnres.errors import ConfigError

LEARNING_RATE = "optim.learning_rate"


def record_row(
    planned: Mapping[str, Any], record: Mapping[str, Any] | None, convention: str, absent: str = "missing"
) -> dict[str, Any]:
    """One row of the table. Compute in FLOP, loss in nats, time in seconds; axes under their own keys.

    `status` is finished, unfinished (schedule not ended), diverged, failed, or `absent` without a record.
    """
    axes = {f"axis:{key}": value for key, value in (planned.get("axes") or {}).items()}
    row: dict[str, Any] = {
        "id": planned["id"],
        "trial": planned.get("name") or planned["id"],
        "size": str(planned["size"]),
        "rule": str(planned["rule"]),
        "seed": planned["seed"],
        **axes,
        "status": absent,
    }
    if record is None:
        return row
    row["status"] = record["status"]
    if record["status"] == "finished" and not record["schedule_complete"]:
        row["status"] = "unfinished"
    timing, environment, times = record["timing"], record["environment"], time_columns(record)
    validation, shape = record["validation"] or {}, record["config"].get("model") or {}
    row |= {
        "reason": record["reason"],
        "loss": _number(validation.get("loss_nats")),
        "loss_standard_error": _number(validation.get("standard_error")),
        "bits_per_byte": _number(validation.get("bits_per_byte")),
        "compute": _number(record["training_flops"].get(convention)),
        **{f"compute_{name}": _number(record["training_flops"].get(name)) for name in CONVENTIONS},
        "tokens": record["tokens"],
        "steps": record["steps"],
        **{key: shape.get(key) for key in ("width", "depth", "heads")},
        "parameters": record["parameters"].get("total"),
        "non_embedding_parameters": record["parameters"].get("non_embedding"),
        "learning_rate": record["learning_rate"],
        "train_seconds": _number(timing.get("train_seconds")),
        "median_step_train_seconds": _number(timing.get("median_step_seconds")) * record["steps"],
        "tokens_per_second": _number(timing.get("tokens_per_second")),
        "attempts": timing.get("attempts"),
        "machine": f"{times['processor']} {times['threads']} threads",
        **times,
        "commit": _commit(environment),
        "data_fingerprint": record["data"].get("fingerprint"),
        "validation_fingerprint": record["data"].get("validation_fingerprint"),
    }
    return row


def _commit(environment: Mapping[str, Any]) -> str | None:
    """Marked where files differed from it."""
    commit = environment.get("commit")
    return f"{commit}+changes" if commit and environment.get("source_modified") else commit


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def axis_columns(table: pd.DataFrame) -> list[str]:
    return [column for column in table.columns if str(column).startswith("axis:")]


def select(every: pd.DataFrame, where: Mapping[str, str], source: str) -> pd.DataFrame:
    """Rows with the given axis values; one trial per size, rule and seed must be left."""
    chosen = every
    axes = {column.removeprefix("axis:"): column for column in axis_columns(every)}
    for key, text in where.items():
        if key not in axes:
            raise ConfigError(
                "where", f"{key}={text}", f"the axes of this study are {', '.join(axes) or 'none'}"
            )
        kept = chosen[[same_value(value, text) for value in chosen[axes[key]]]]
        if kept.empty:
            has = ", ".join(_distinct(chosen[axes[key]]))
            raise ConfigError("where", f"{key}={text}", f"no trial has it; the values are {has}")
        chosen = kept
    for key, column in axes.items():
        values = _distinct(chosen[column])
        if len(values) > 1 and key not in where and chosen.duplicated(["size", "rule", "seed"]).any():
            raise StudyError(
                f"{source}: {key} has the values {', '.join(values)}; choose one, "
                f'for example where="{key}={values[0]}"'
            )
    repeated = chosen[chosen.duplicated(["size", "rule", "seed"])]
    if len(repeated):
        raise StudyError(
            f"{source}: planned twice for one size, rule, seed: {name_some(list(repeated['trial']))}"
        )
    return chosen


def parse_where(text: str) -> dict[str, str]:
    """`key=value,key=value` -> mapping."""
    chosen = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("where", part, 'write where="key=value"')
        chosen[key.strip()] = value.strip()
    return chosen


def tuned_rows(
    every: pd.DataFrame, usable: pd.DataFrame, where: Mapping[str, str], source: str
) -> pd.DataFrame:
    """Usable trials plus those that differ from them in the learning rate only."""
    if f"axis:{LEARNING_RATE}" not in every.columns:
        return usable.reset_index(drop=True)
    others = {key: value for key, value in where.items() if key != LEARNING_RATE}
    rows = every[every["status"] == "finished"]
    for key, text in others.items():
        rows = rows[[same_value(value, text) for value in rows[f"axis:{key}"]]]
    for column in ("data_fingerprint", "validation_fingerprint"):
        rows = rows[rows[column].isin(usable[column])]
    rows = rows[~rows["id"].isin(usable["id"])]
    both = pd.concat([usable, rows], ignore_index=True)
    check_losses(both, source)
    return both


def same_value(value: Any, text: str) -> bool:
    try:
        return math.isclose(float(value), float(text), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value) == text or json.dumps(value) == text


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))
