"""Statistics over depth from the probes.npz of a study's trials; docs/record.md has their schema."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.arrays import Array
from analysis.gate import StudyError
from analysis.serialise import plain
from analysis.study_data import StudyData

PROBES_FILE = "probes.npz"
SCHEMA = 1
NEEDED = ("tokens", "loss_nats", "read_rms", "block_output_rms", "block_gradient_norm")
WEIGHTS = ("depth_weights", "depth_entropy_nats")


@dataclass(frozen=True)
class RuleProbes:
    """A rule's probes, mean over its seeds. First axis: the probes."""

    rule: str
    seeds: tuple[str, ...]
    tokens: Array  # trained so far
    loss_nats: Array
    read_rms: Array  # [probe, read]
    block_output_rms: Array  # [probe, block]
    block_gradient_norm: Array  # [probe, block]
    depth_weights: Array | None  # [probe, read, source]; nan where a read has no such source
    depth_entropy_nats: Array | None
    reads: tuple[str, ...]
    sources: tuple[str, ...]  # of depth_weights

    def reads_of(self, kind: str) -> list[int]:
        """Indices of the reads of attention or of the MLPs; the output's is in neither."""
        return [i for i, label in enumerate(self.reads) if label.startswith(f"{kind}_")]


@dataclass(frozen=True)
class Dynamics:
    """What a study's probes show; `notes` says what is missing."""

    size: str
    rules: Mapping[str, RuleProbes]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        keys = ("seeds", "tokens", "loss_nats", "block_output_rms", "block_gradient_norm", "read_rms")
        rules = {rule: {key: plain(getattr(p, key)) for key in keys} for rule, p in self.rules.items()}
        return {"size": self.size, "rules": rules, "notes": list(self.notes)}


def read_dynamics(data: StudyData) -> Dynamics:
    """Probes of the largest size, averaged over seeds. Trials without a file are named in the notes.

    Raises StudyError for a file that cannot be read or is of another trial.
    """
    size = str(data.table["size"].iloc[int(data.table["compute"].to_numpy(float).argmax())])
    rows = data.table[data.table["size"] == size]
    rules, missing = {}, []
    for rule in data.rules:
        found = []
        for _, row in rows[rows["rule"] == rule].iterrows():
            path = data.folder / str(row["id"]) / PROBES_FILE
            if path.exists():
                found.append((str(row["seed"]), _read(path, str(row["id"]))))
            else:
                missing.append(str(row["trial"]))
        if found:
            rules[rule] = _mean(rule, found, data.name)
    notes = [f"no {PROBES_FILE} of {', '.join(missing)}"] if missing else []
    if data.table["size"].nunique() > 1:
        notes.append(f"probes of {size} only, the largest size")
    return Dynamics(size, rules, tuple(notes))


def _read(path: Path, trial: str) -> dict[str, Any]:
    try:
        # Opened here: of a torn file numpy leaves its own handle open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["schema"] != SCHEMA or about["trial_id"] != trial:
                raise StudyError(f"{path}: is schema {about['schema']} of trial {about['trial_id']}")
            arrays: dict[str, Any] = {name: file[name].astype(float) for name in NEEDED}
            arrays |= {name: file[name].astype(float) for name in WEIGHTS if name in file.files}
            arrays["reads"] = tuple(file["read"].tolist())
            arrays["sources"] = tuple(file["depth_source"].tolist()) if "depth_source" in file.files else ()
            return arrays
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StudyError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None


def _mean(rule: str, found: Sequence[tuple[str, Mapping[str, Any]]], study: str) -> RuleProbes:
    first = found[0][1]
    for seed, arrays in found:
        if not np.array_equal(arrays["tokens"], first["tokens"]):
            raise StudyError(f"study={study}: the probes of {rule} seed {seed} are at other token counts")
    means: dict[str, Any] = {name: np.mean([arrays[name] for _, arrays in found], axis=0) for name in NEEDED}
    means |= {
        name: np.mean([arrays[name] for _, arrays in found], axis=0) if name in first else None
        for name in WEIGHTS
    }
    return RuleProbes(
        rule=rule,
        seeds=tuple(seed for seed, _ in found),
        reads=first["reads"],
        sources=first["sources"],
        **means,
    )
