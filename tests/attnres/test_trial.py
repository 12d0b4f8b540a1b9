"""Resolution of a configuration: budgets, the id, what stays equal across rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnres.compose import compose_trial
from attnres.data.corpus import PackedCorpus
from attnres.errors import ConfigError, DataError
from attnres.trial import Trial, resolve

CORPUS = PackedCorpus(
    folder=Path("unused"),
    fingerprint="f" * 16,
    validation_fingerprint="v" * 16,
    vocabulary=257,
    train_tokens=50_000_000,
    validation_tokens=2_000_000,
    report={},
)


def trial(*overrides: str, corpus: PackedCorpus = CORPUS) -> Trial:
    return resolve(compose_trial(list(overrides)), corpus)


def test_tokens_per_parameter_counts_the_prenorm_model_of_the_size() -> None:
    base = trial("residual=prenorm", "budget.tokens_per_parameter=20")
    full = trial("residual=attnres_full", "budget.tokens_per_parameter=20")
    assert full.counts.total_parameters > base.counts.total_parameters
    assert full.steps == base.steps == round(20 * base.counts.non_embedding_parameters / base.batch_tokens)


def test_flops_budget_counts_the_prenorm_model_of_the_size() -> None:
    base = trial("residual=prenorm", "budget=flops", "budget.flops=1e12")
    full = trial("residual=attnres_full", "budget=flops", "budget.flops=1e12")
    assert full.steps == base.steps
    assert base.training_flops()["total"] == pytest.approx(1e12, rel=0.01)
    assert full.training_flops()["total"] > base.training_flops()["total"]


def test_the_budgets_agree_with_each_other() -> None:
    tokens = 2_000_000
    by_tokens = trial("budget=tokens", f"budget.tokens={tokens}")
    counts = by_tokens.baseline_counts
    by_ratio = trial(f"budget.tokens_per_parameter={tokens / counts.non_embedding_parameters}")
    by_flops = trial("budget=flops", f"budget.flops={tokens * counts.flops_per_token}")
    assert by_tokens.steps == by_ratio.steps == by_flops.steps
    assert by_tokens.id == by_ratio.id == by_flops.id  # the same run, however its length was asked for


IDS = {"prenorm": "1861a835f532", "attnres_full": "9a4b4aa2262e", "attnres_block": "2618f9fc4ce1"}


def test_ids_are_those_of_earlier_versions() -> None:
    """A finished trial must not be trained again because an optimizer or an option was added."""
    ids = {rule: trial(f"residual={rule}").id for rule in ("prenorm", "attnres_full", "attnres_block")}
    assert ids == IDS, "what is trained is the same, or else say in the change that records are void"


CHANGES_NUMBERS = [
    "optim=muon",
    "seed=1",
    "residual=attnres_full",
    "residual=attnres_block",
    "model.width=48",
    "model.heads=2",
    "model.batch_size=32",
    "model.tie_embeddings=true",
    "model.rope_base=500",
    "optim.learning_rate=1e-3",
    "optim.weight_decay=0",
    "optim.grad_clip=null",
    "schedule.warmup_fraction=0.1",
    "schedule=wsd",
    "budget.tokens_per_parameter=10",
    "budget.evaluations=3",
    "runtime.dtype=bfloat16",
    "data.validation_tokens=131072",
]
SAME_NUMBERS = [
    "runtime.threads=2",
    "runtime.microbatch_size=2",
    "runtime.checkpoint_seconds=5",
    "runtime.progress=none",
    "tracking=none",
    "tracking.project=other",
    "study_name=other",
    "runs_dir=elsewhere",
    "data.cache_dir=elsewhere",
    "model.learning_rate=${optim.learning_rate}",
]


def test_the_id_changes_with_whatever_can_change_the_numbers() -> None:
    ids = [trial(change).id for change in CHANGES_NUMBERS] + [trial().id]
    ids.append(trial(corpus=replace(CORPUS, fingerprint="other")).id)
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("change", SAME_NUMBERS[:-1])
def test_the_id_keeps_what_only_changes_how_it_runs(change: str) -> None:
    assert trial(change).id == trial().id


def test_two_block_options_of_equal_meaning_have_different_labels() -> None:
    labels = [
        trial("residual=attnres_block", "residual.num_blocks=4").config.residual.label(),
        trial("residual=attnres_block", "residual.num_blocks=8").config.residual.label(),
        trial(
            "residual=attnres_block", "residual.num_blocks=null", "residual.block_size=4"
        ).config.residual.label(),
    ]
    assert len(set(labels)) == 3


def test_evaluations_end_at_the_last_step() -> None:
    for evaluations in (1, 3, 7, 1000):
        resolved = trial("budget=tokens", "budget.tokens=40960", f"budget.evaluations={evaluations}")
        steps = resolved.evaluation_steps
        assert steps[-1] == resolved.steps
        assert list(steps) == sorted(set(steps))
        assert len(steps) == min(evaluations, resolved.steps)
        assert steps[0] >= 1


def test_more_than_four_epochs_warn() -> None:
    few = replace(CORPUS, train_tokens=100_000)
    assert "times" in trial("budget=tokens", "budget.tokens=1e6", corpus=few).warnings[0]
    assert not trial("budget=tokens", "budget.tokens=3e5", corpus=few).warnings


def test_less_data_than_a_batch_refuses() -> None:
    with pytest.raises(DataError, match=r"4,096 training tokens.*batch_size=16.*context=256"):
        trial("model.batch_size=16", corpus=replace(CORPUS, train_tokens=4096))


def test_a_budget_below_a_step_refuses() -> None:
    with pytest.raises(ConfigError, match=r"budget\.tokens=100"):
        trial("budget=tokens", "budget.tokens=100")
