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
            names = [name for name in (*NEEDED, *WEIGHTS) if name in NEEDED or name in file.files]
            raw = {name: file[name] for name in names}
            reads = tuple(np.atleast_1d(file["read"]).tolist())
            sources = tuple(np.atleast_1d(file["depth_source"]).tolist()) if WEIGHTS[0] in raw else ()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StudyError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    said = (about.get("schema"), about.get("trial_id")) if isinstance(about, dict) else (None, None)
    if said != (SCHEMA, trial):
        raise StudyError(f"{path}: is schema {said[0]} of trial {said[1]}")
    _check_shapes(path, raw, len(reads), len(sources))
    return {**{name: array.astype(float) for name, array in raw.items()}, "reads": reads, "sources": sources}


def _check_shapes(path: Path, raw: Mapping[str, Any], reads: int, sources: int) -> None:
    """One row for each probe, and the axes of docs/record.md. A block has two reads, the output one."""
    probes, blocks = np.shape(raw["tokens"])[:1], (reads - 1) // 2
    if not probes or probes[0] < 1 or reads % 2 != 1:
        raise StudyError(f"{path}: has no probes")
    if len([name for name in WEIGHTS if name in raw]) == 1:
        raise StudyError(f"{path}: {' and '.join(WEIGHTS)}: one is missing")
    expected = {
        "tokens": probes,
        "loss_nats": probes,
        "read_rms": (*probes, reads),
        "block_output_rms": (*probes, blocks),
        "block_gradient_norm": (*probes, blocks),
        "depth_weights": (*probes, reads, sources),
        "depth_entropy_nats": (*probes, reads),
    }
    for name, array in raw.items():
        if array.dtype.kind not in "iuf" or array.shape != expected[name]:
            raise StudyError(f"{path}: {name} is {array.dtype} {array.shape}, not numbers {expected[name]}")
        if name in NEEDED and not (np.isfinite(array).all() and (array >= 0).all()):
            raise StudyError(f"{path}: {name} has values that are no magnitudes")


def _mean(rule: str, found: Sequence[tuple[str, Mapping[str, Any]]], study: str) -> RuleProbes:
    first = found[0][1]
    for seed, arrays in found:
        if not np.array_equal(arrays["tokens"], first["tokens"]):
            raise StudyError(f"study={study}: the probes of {rule} seed {seed} are at other token counts")
        if (arrays["reads"], arrays["sources"]) != (first["reads"], first["sources"]):
            raise StudyError(f"study={study}: the probes of {rule} seed {seed} have other reads or sources")
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
