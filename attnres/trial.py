"""Config -> Trial: everything that follows from a configuration, computed once and never changed.

Nobody downstream recomputes steps, rates or counts; what is stored in the record is what ran.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.config import TrialConfig, to_mapping
from attnres.counts import Counts, count
from attnres.data.corpus import PackedCorpus
from attnres.errors import ConfigError, DataError
from attnres.residual.specs import SPECS

EPOCHS_BEFORE_WARNING = 4  # 2305.16264: up to 4 epochs are nearly as good as fresh data
ID_LENGTH = 12

# Keys that cannot change a trial's numbers beyond the order of floating-point sums: changing them keeps what
# is finished.
_OUTSIDE_ID = {
    "model": ("name", "learning_rate"),  # the rate that counts is optim.learning_rate
    # The fingerprint stands for these.
    "data": ("path", "cache_dir", "text_field", "corpus", "tokenizer", "validation_fraction"),
    "runtime": (
        "threads",
        "microbatch_size",
        "compile",
        "checkpoint_activations",
        "checkpoint_seconds",
        "progress",
        "log_every_steps",
        "keep_weights",
        "device",
        "parallel",
        "processes",
    ),
    "budget": ("tokens", "tokens_per_parameter", "flops"),  # the resolved number of steps counts
}


@dataclass(frozen=True)
class Trial:
    """One training run, resolved. Tokens are those trained on; steps are optimizer steps."""

    config: TrialConfig
    id: str
    counts: Counts
    baseline_counts: Counts  # of prenorm at this size: what the budget is set by
    vocabulary: int
    device: str  # "cpu" or "cuda"
    steps: int
    batch_tokens: int
    warmup_steps: int
    evaluation_steps: tuple[int, ...]  # strictly increasing; the last one is `steps`
    data_fingerprint: str
    train_tokens: int  # in the corpus
    epochs: float
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens

    @property
    def folder(self) -> Path:
        return Path(self.config.runs_dir) / self.config.study_name / self.id

    @property
    def name(self) -> str:
        """For people: size-rule-seed-hash."""
        return f"{self.config.model.name}-{self.config.residual.label()}-s{self.config.seed}-{self.id[:6]}"

    def training_flops(self) -> dict[str, int]:
        """FLOPs of the whole run by convention."""
        return {name: flops * self.tokens for name, flops in self.counts.training_flops_per_token().items()}


def resolve(config: TrialConfig, corpus: PackedCorpus) -> Trial:
    """Resolve a configuration against its corpus. Raises ConfigError or DataError before any work starts."""
    model, vocabulary = config.model, corpus.vocabulary
    counts = count(model, config.residual, vocabulary)
    baseline = count(model, SPECS["prenorm"](), vocabulary)
    batch_tokens = model.batch_size * model.context
    steps = _steps(config, baseline, batch_tokens)
    if corpus.train_tokens < batch_tokens + 1:
        raise DataError(
            f"data.corpus={config.data.corpus}: {corpus.train_tokens:,} training tokens, less than a batch "
            f"of {batch_tokens:,} (model.batch_size={model.batch_size} x model.context={model.context})"
        )
    epochs = steps * batch_tokens / corpus.train_tokens
    warnings = []
    if epochs > EPOCHS_BEFORE_WARNING:
        warnings.append(
            f"{steps * batch_tokens:,} tokens go over the {corpus.train_tokens:,} training tokens "
            f"{epochs:.1f} times; above {EPOCHS_BEFORE_WARNING} times the loss no longer follows the compute"
        )
    evaluations = min(config.budget.evaluations, steps)
    evaluation_steps = tuple(round(steps * (i + 1) / evaluations) for i in range(evaluations))
    device = _resolve_device(config.runtime.device)
    if device != "cuda" and getattr(config.residual, "implementation", None) == "kernel":
        raise ConfigError("residual.implementation", "kernel", "needs a CUDA device: runtime.device=cuda")
    return Trial(
        config=config,
        id=_trial_id(config, steps, corpus.fingerprint, device),
        counts=counts,
        baseline_counts=baseline,
        vocabulary=vocabulary,
        device=device,
        steps=steps,
        batch_tokens=batch_tokens,
        warmup_steps=round(config.schedule.warmup_fraction * steps),
        evaluation_steps=evaluation_steps,
        data_fingerprint=corpus.fingerprint,
        train_tokens=corpus.train_tokens,
        epochs=epochs,
        warnings=tuple(warnings),
    )


def _steps(config: TrialConfig, baseline: Counts, batch_tokens: int) -> int:
    budget = config.budget
    if budget.tokens is not None:
        field, value, tokens = "tokens", float(budget.tokens), float(budget.tokens)
    elif budget.tokens_per_parameter is not None:
        field, value = "tokens_per_parameter", budget.tokens_per_parameter
        tokens = budget.tokens_per_parameter * baseline.non_embedding_parameters
    else:
        assert budget.flops is not None
        field, value, tokens = "flops", budget.flops, budget.flops / baseline.flops_per_token
    steps = round(tokens / batch_tokens)
    if steps < 1:
        why = f"is {tokens:,.0f} tokens, less than half a batch of {batch_tokens:,}"
        raise ConfigError(f"budget.{field}", f"{value:g}", why)
    return steps


def _resolve_device(device: str) -> str:
    """The GPU where there is one, if asked to choose. Without importing torch: plans must be fast."""
    if device != "auto":
        return device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def _trial_id(config: TrialConfig, steps: int, fingerprint: str, device: str) -> str:
    mapping: dict[str, Any] = to_mapping(config)
    for group, keys in _OUTSIDE_ID.items():
        for key in keys:
            del mapping[group][key]
    mapping["residual"].pop("implementation", None)  # several ways to compute one rule
    for field in dataclasses.fields(config.residual):
        # An option that came after its rule has a default: there the trial is what it was without the option.
        if getattr(config.residual, field.name) == field.default:
            del mapping["residual"][field.name]
    for key in ("tracking", "study_name", "runs_dir"):
        del mapping[key]
    mapping |= {"steps": steps, "data_fingerprint": fingerprint, "device": device}
    canonical = json.dumps(mapping, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:ID_LENGTH]
