"""probes.npz: the statistics over depth of a trial, one row per probe; docs/record.md has the schema."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attnres.checkpoint import write_bytes_atomic
from attnres.notice import warn
from attnres.residual import specs
from attnres.trial import Trial

PROBES_FILE = "probes.npz"
SCHEMA = 1
# Axes of every array; scalars per probe have the first only.
AXES: Mapping[str, tuple[str, ...]] = {
    "step": ("probe",),
    "tokens": ("probe",),
    "loss_nats": ("probe",),
    "read_rms": ("probe", "read"),
    "output_rms": ("probe", "source"),
    "output_gradient_rms": ("probe", "source"),
    "block_output_rms": ("probe", "block"),
    "block_gradient_norm": ("probe", "block"),
    "mixing": ("probe", "read", "source"),
    "mixing_error": ("probe", "read"),
    "depth_weights": ("probe", "read", "depth_source"),
    "depth_entropy_nats": ("probe", "read"),
}


def probe_steps(trial: Trial) -> frozenset[int]:
    """Optimizer steps after which the trial is probed."""
    return frozenset(round(fraction * trial.steps) for fraction in trial.config.tracking.probes_at)


class ProbeFile:
    """The rows of a trial, on the disk after each probe.

    The file itself is what a resumed run continues: rows after the step it resumes from are dropped and
    measured again, so none is lost and none is there twice.
    """

    def __init__(self, trial: Trial, step: int) -> None:
        self.trial, self.path = trial, trial.folder / PROBES_FILE
        self.rows: dict[int, dict[str, npt.NDArray[Any]]] = {}
        try:
            self.rows = {row: values for row, values in self._load().items() if row <= step}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            warn(f"{self.path}: cannot be read ({error}); earlier probes are lost")

    def add(self, step: int, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the probe after `step` and write the file. A full disk costs the file, not the run."""
        where = {"step": np.array(step), "tokens": np.array(step * self.trial.batch_tokens)}
        self.rows[step] = where | dict(values)
        try:
            write_bytes_atomic(self.path, self._serialise())
        except OSError as error:
            warn(f"{self.path}: {error.strerror}: the probe after step {step} is not kept")

    def _serialise(self) -> bytes:
        rows = [self.rows[step] for step in sorted(self.rows)]
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        about = {"schema": SCHEMA, "trial_id": self.trial.id, "rule": self.trial.config.residual.label()}
        axes = {name: AXES[name] for name in arrays}
        buffer = io.BytesIO()
        texts = {"axes": np.array(json.dumps(axes)), "about": np.array(json.dumps(about))}
        np.savez(buffer, **arrays, **texts, **_coordinates(self.trial, arrays))  # type: ignore[arg-type]
        return buffer.getvalue()

    def _load(self) -> dict[int, dict[str, npt.NDArray[Any]]]:
        with np.load(self.path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["schema"] != SCHEMA or about["trial_id"] != self.trial.id:
                raise ValueError(f"schema {about['schema']} of trial {about['trial_id']}")
            arrays = {name: file[name] for name in json.loads(str(file["axes"]))}
        steps = arrays["step"].tolist()
        return {step: {name: array[i] for name, array in arrays.items()} for i, step in enumerate(steps)}


def _coordinates(trial: Trial, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The names along each axis but the probes'."""
    depth = trial.config.model.depth
    sublayers = [f"{kind}_{block}" for block in range(1, depth + 1) for kind in ("attention", "mlp")]
    names = {
        "read": [*sublayers, "output"],
        "source": ["embedding", *sublayers],
        "block": [f"block_{block}" for block in range(1, depth + 1)],
    }
    if "depth_weights" in arrays:
        count = arrays["depth_weights"].shape[-1]
        kind = "state" if isinstance(trial.config.residual, specs.DenseFormer) else "depth_block"
        blocks = [f"{kind}_{number}" for number in range(1, count)]
        names["depth_source"] = ["embedding", *(sublayers if count == len(sublayers) + 1 else blocks)]
    return {axis: np.array(labels) for axis, labels in names.items()}
