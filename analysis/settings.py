"""What trials must have in common to be compared, and what their times must have in common.

A trial's id is a hash of its settings, so trials that differ in them live side by side in one study; nothing
but the records says whether two of them differ in more than the rule and the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

ABSENT = "absent"

# Parts of the configuration that decide how a trial learns and how it is judged. model.name is the size, and
# the rate that counts is optim.learning_rate; the fingerprints, checked on their own, stand for the corpus.
_GROUPS = ("model", "optim", "schedule")
_LEAVES = ("data.validation_tokens", "data.interim_validation_tokens", "runtime.dtype")
_NO_MATTER = ("model.name", "model.learning_rate")
_RESOLVED = ("planned_tokens", "planned_steps", "learning_rate")

# A declared axis (or group) sets these as well.
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "budget": ("planned_tokens", "planned_steps"),
    "model": ("planned_tokens", "planned_steps", "optim.learning_rate", "learning_rate"),
    "optim": ("learning_rate",),
}

# Columns of the table that a trial's time depends on, though not its id; with the key in the record.
TIME_KEYS: Mapping[str, str] = {
    "processor": "processor",
    "threads": "environment.threads",
    "microbatch_size": "runtime.microbatch_size",
    "compile": "runtime.compile",
    "checkpoint_activations": "runtime.checkpoint_activations",
    "parallel": "runtime.parallel",
    "processes": "runtime.processes",
    "torch": "environment.torch",
}
IMPLEMENTATION = "implementation"  # of an AttnRes rule; other rules have none


def fair_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the trials of a size must share, by dotted key."""
    all_leaves = dict(leaves(record["config"], ""))
    chosen = {
        key: value
        for key, value in all_leaves.items()
        if key not in _NO_MATTER and (key.partition(".")[0] in _GROUPS or key in _LEAVES)
    }
    chosen |= {key: record[key] for key in _RESOLVED}
    environment = record["environment"]
    return chosen | {f"environment.{key}": environment.get(key, ABSENT) for key in ("device", "dtype")}


def leaves(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a nested mapping."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_axis(key: str, axes: Sequence[str]) -> bool:
    """Whether a declared axis of the study sets this key."""
    return any(
        key == axis or key.startswith(f"{axis}.") or key in _FOLLOWS.get(axis.partition(".")[0], ())
        for axis in axes
    )


def differing_settings(
    rows: pd.DataFrame, records: Mapping[str, Mapping[str, Any]], axes: Sequence[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """Each key on which trials of one size disagree: key, its values, the trials in the minority."""
    settings = {str(i): fair_settings(records[str(i)]) for i in rows["id"]}
    for key in dict.fromkeys(key for mapping in settings.values() for key in mapping):
        if is_axis(key, axes):
            continue
        line, minority = "", []
        for size, members in rows.groupby("size", sort=False):
            by_value: dict[str, list[str]] = {}
            for trial_id, trial in zip(members["id"], members["trial"], strict=True):
                by_value.setdefault(_text(settings[str(trial_id)].get(key, ABSENT)), []).append(str(trial))
            if len(by_value) > 1:
                most, *others = sorted(by_value.items(), key=lambda item: -len(item[1]))
                values = ", ".join(f"{value} in {len(names)}" for value, names in (most, *others))
                line = line or f"trials of {size}: {values}"
                minority += [name for _, names in others for name in names]
        if minority:
            yield key, line, minority


def time_columns(record: Mapping[str, Any]) -> dict[str, str]:
    """Columns of TIME_KEYS and the rule's implementation, as text ("" where a rule has none)."""
    environment, config = record["environment"], record["config"]
    runtime = config.get("runtime") or {}
    on_cpu = environment.get("device") == "cpu"
    processor = environment.get("cpu") if on_cpu else environment.get("device_name")
    implementation = (config.get("residual") or {}).get(IMPLEMENTATION)
    return {
        "processor": _text(processor or environment.get("device")),
        "threads": _text(environment.get("threads")),
        **{
            key: _text(runtime.get(key, ABSENT))
            for key in ("microbatch_size", "compile", "checkpoint_activations")
        },
        # Records of before there were several processes have neither.
        "parallel": _text(runtime.get("parallel", "none")),
        "processes": _text(runtime.get("processes", 1)),
        "torch": _text(environment.get("torch", ABSENT)),
        IMPLEMENTATION: "" if implementation is None else str(implementation),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def why_times_differ(rows: pd.DataFrame, table: pd.DataFrame) -> str | None:
    """Why the times of two arms cannot be compared: the first key that differs within a size, or None.

    `rows` are the trials of the two arms, `table` those of all rules: AttnRes rules are timed in one
    implementation or not at all, so that their times can be compared with each other too.
    """
    for column, key in TIME_KEYS.items():
        if column not in rows.columns:
            continue
        counts = rows.groupby("size", sort=False)[column].nunique(dropna=False)
        mixed = [str(size) for size in counts.index[counts > 1]]
        if mixed:
            values = ", ".join(sorted(set(map(str, rows.loc[rows["size"].isin(mixed), column]))))
            return f"withheld: trials of one size differ in {key} ({values}; {', '.join(mixed)})"
    if IMPLEMENTATION in rows.columns and (rows[IMPLEMENTATION] != "").any():
        used = sorted(set(map(str, table[IMPLEMENTATION])) - {""})
        if len(used) > 1:
            return f"withheld: the AttnRes rules differ in residual.implementation ({', '.join(used)})"
    return None


def mixed_software(rows: pd.DataFrame) -> list[str]:
    """A note for each of torch's version and the code's commit that is not the same in all trials."""
    notes = []
    for column, what in (("torch", "versions of torch"), ("commit", "commits of the code")):
        values = sorted(set(map(str, rows[column].dropna()))) if column in rows.columns else []
        if len(values) > 1:
            notes.append(
                f"the trials come from {len(values)} {what} ({', '.join(values)}); "
                "whether they train alike was not checked"
            )
    return notes
