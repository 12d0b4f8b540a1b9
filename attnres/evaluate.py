"""Validation loss on the fixed windows, in nats per token and bits per byte. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnres.data.corpus import PackedCorpus
from attnres.data.sampler import validation_windows
from attnres.data.tokenizer import bits_per_byte, count_bytes
from attnres.run_state import Diverged
from attnres.trial import Trial


@dataclass(frozen=True)
class ValidationSet:
    """The fixed windows of a study; the interim set is their first part."""

    inputs: npt.NDArray[np.int64]  # [windows, context]
    targets: npt.NDArray[np.int64]  # [windows, context]
    interim_windows: int

    def part(self, final: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(inputs, targets) of the whole set for the final evaluation, of the interim set otherwise."""
        windows = len(self.inputs) if final else self.interim_windows
        return self.inputs[:windows], self.targets[:windows]


def open_validation(trial: Trial, corpus: PackedCorpus) -> ValidationSet:
    data, context = trial.config.data, trial.config.model.context
    inputs, targets = validation_windows(corpus, data.validation_tokens, context)
    interim_windows = min(len(inputs), max(1, data.interim_validation_tokens // context))
    return ValidationSet(inputs, targets, interim_windows)


@dataclass(frozen=True)
class Evaluation:
    """`standard_error` is that of the mean over windows: how far `loss_nats` may be from the loss on endless
    text of this kind, for this one trained model. It takes windows as independent, so windows that share a
    document make it a little too small. It says nothing about another seed, and two models read the same
    windows: the difference of their losses is known better than either. None with a single window.
    """

    loss_nats: float  # mean per token
    standard_error: float | None
    bits_per_byte: float
    tokens: int
    windows: int


def summarise(window_losses: npt.NDArray[np.float64], targets: npt.NDArray[np.int64]) -> Evaluation:
    """From mean losses per window [windows] and their targets [windows, context]; Diverged if any is not
    finite.
    """
    windows = len(window_losses)
    loss_nats = float(window_losses.mean())
    if not math.isfinite(loss_nats):
        raise Diverged(f"validation loss is {loss_nats}")
    standard_error = float(window_losses.std(ddof=1) / math.sqrt(windows)) if windows > 1 else None
    return Evaluation(
        loss_nats=loss_nats,
        standard_error=standard_error,
        bits_per_byte=bits_per_byte(loss_nats * targets.size, count_bytes(targets)),
        tokens=targets.size,
        windows=windows,
    )


def evaluation_row(evaluation: Evaluation, step: int, tokens: int) -> dict[str, Any]:
    """An evaluation as the record's list has it; `tokens` are those trained on so far."""
    return {
        "step": step,
        "tokens": tokens,
        "loss_nats": evaluation.loss_nats,
        "standard_error": evaluation.standard_error,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens_evaluated": evaluation.tokens,
    }
