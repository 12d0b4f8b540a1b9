"""The studies of conf/study: each resolves to the grid that its question needs. Nothing is trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sweeps_support import Workplace

from attnres.compose import compose_trial, config_dir, group_options
from sweeps.study import Study, describe, load_study

SHIPPED = group_options()["study"]
# Rows (rules), sizes, seeds, values of the axes.
GRIDS = {
    "ablation": (12, 1, 3, 1),
    "block_count": (7, 1, 3, 1),
    "dynamics": (3, 1, 1, 1),
    "learning_rate": (2, 5, 1, 4),
    "paper": (4, 5, 1, 1),
    "scaling_law": (3, 5, 3, 1),
    "shape": (2, 25, 1, 1),
    "smoke": (3, 3, 1, 1),
}
WITHIN = 1.02  # of the shapes' parameters and FLOPs


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    """All of them on a corpus that holds a batch of the largest size, 432 sequences of 8192 tokens."""
    workplace = Workplace(tmp_path_factory.mktemp("shipped"))
    for index in range(16):
        (workplace.corpus / f"long_{index}.txt").write_text(f"{index:06d} " * 60_000)
    return {name: load_study([f"study={name}", *workplace.overrides()]) for name in SHIPPED}


def test_every_shipped_study_has_its_grid_here() -> None:
    assert sorted(GRIDS) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_study_resolves(name: str, shipped: dict[str, Study]) -> None:
    study = shipped[name]
    rules, sizes, seeds, values = GRIDS[name]
    assert study.name == name
    assert len({planned.trial.id for planned in study.trials}) == len(study.trials)
    assert len(study.trials) == rules * sizes * seeds * values
    assert len({planned.rule for planned in study.trials}) == rules
    assert len({planned.size for planned in study.trials}) == sizes
    cells = Counter(planned.cell for planned in study.trials)
    assert set(cells.values()) == {seeds}
    for planned in study.trials:
        assert planned.trial.counts.flops_per_token > 0
        assert planned.trial.config.model.name == planned.size
    plan = describe(study)
    if plan["report"] in (None, "multiplier"):
        assert {claim.multiplier for claim in study.config.study.claims} >= {1.25}
    assert plan["report"] is not None or sizes > 2


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_preset_says_what_it_is_for(name: str) -> None:
    head = (config_dir() / "study" / f"{name}.yaml").read_text().split("\nname:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for part in ("Purpose:", "Command:", "Expect:", f"study={name}"):
        assert part in head


def test_smoke_says_that_it_cannot_judge(shipped: dict[str, Study]) -> None:
    assert describe(shipped["smoke"])["too_small"]


def test_scaling_law_is_the_ladder_of_the_issue(shipped: dict[str, Study]) -> None:
    study = shipped["scaling_law"]
    assert describe(study)["too_small"] is False
    assert all(planned.trial.config.model.depth >= 8 for planned in study.trials)


def test_block_sizes_are_those_of_the_paper(shipped: dict[str, Study]) -> None:
    specs = {planned.trial.config.residual for planned in shipped["block_count"].trials}
    layers = {planned.trial.config.model.layers for planned in shipped["block_count"].trials}
    assert layers == {32}
    sizes = [spec.resolved_block_size(32) for spec in specs if hasattr(spec, "resolved_block_size")]
    assert sorted(sizes) == [1, 2, 4, 8, 16, 32]


def test_shapes_have_equal_parameters_and_flops(shipped: dict[str, Study]) -> None:
    trials = shipped["shape"].trials
    parameters = [planned.trial.counts.non_embedding_parameters for planned in trials]
    flops = [planned.trial.training_flops()["without_residual"] for planned in trials]
    arms = [
        [planned.flops for planned in trials if planned.rule == rule]
        for rule in ("prenorm", "attnres_block_n4")
    ]
    assert [len(arm) for arm in arms] == [25, 25]
    for values in (parameters, flops, *arms):
        assert max(values) / min(values) <= WITHIN
    models = {planned.size: planned.trial.config.model for planned in trials}.values()
    assert len({(model.width, model.depth) for model in models}) == 5
    for model in models:  # 0.3 to 0.7 heads per transformer block, in whole heads
        assert min(abs(model.heads - share * model.depth) for share in (0.3, 0.4, 0.5, 0.6, 0.7)) <= 0.5
    ratios = sorted({model.width / model.depth for model in models})
    assert ratios[-1] / ratios[0] >= 5 - 1e-9  # the paper: 15 to 75


def test_the_paper_study_is_table_2(shipped: dict[str, Study]) -> None:
    tokens = {planned.size: planned.trial.config.budget.tokens for planned in shipped["paper"].trials}
    assert [round(value / 1e8) / 10 for value in tokens.values() if value] == [38.7, 45.4, 62.1, 87.9, 119.0]
    for planned in shipped["paper"].trials:
        config = planned.trial.config
        assert planned.trial.tokens == pytest.approx(config.budget.tokens, rel=1e-4)
        active = float(planned.size.removeprefix("paper_").removesuffix("m")) * 1e6
        assert planned.trial.baseline_counts.non_embedding_parameters == pytest.approx(active, rel=0.01)


def test_dynamics_probes_over_training(shipped: dict[str, Study]) -> None:
    at = {planned.trial.config.tracking.probes_at for planned in shipped["dynamics"].trials}
    assert len(at) == 1
    (fractions,) = at
    assert fractions[0] == 0 and fractions[-1] == 1 and len(fractions) >= 5


def test_cells_are_what_the_files_alone_compose(shipped: dict[str, Study]) -> None:
    for name, study in shipped.items():
        planned = study.trials[-1]
        alone = compose_trial([*planned.overrides, f"seed={planned.seed}"])
        assert alone == planned.trial.config, name


def test_the_paper_study_has_a_form_for_two_cores(shared_workplace: Workplace) -> None:
    """The override that conf/study/paper.yaml and docs/studies.md give."""
    words = "study.sizes=[cpu_50k,cpu_100k,cpu_150k,cpu_220k] runtime=cpu budget=tokens_per_parameter"
    words += " budget.tokens_per_parameter=6"
    study = load_study(["study=paper", *shared_workplace.overrides(*words.split())])
    assert len(study.trials) == 16
    for planned in study.trials:
        config = planned.trial.config
        assert (config.runtime.device, config.runtime.microbatch_size) == ("cpu", None)
        assert config.budget.tokens is None and planned.trial.tokens < 2e6


def test_the_page_of_studies_has_every_grid() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "studies.md").read_text()
    for name, (rules, sizes, seeds, values) in GRIDS.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {sizes} x {rules} x {seeds}" in line
        assert f"| {rules * sizes * seeds * values} |" in line


def test_probes_of_the_dynamics_study_are_small_beside_its_training(shipped: dict[str, Study]) -> None:
    """A probe is a forward and a backward pass, and what looks at them: 1.3 steps for a batch of tokens."""
    for planned in shipped["dynamics"].trials:
        tracking, model = planned.trial.config.tracking, planned.trial.config.model
        tokens = len(tracking.probes_at) * tracking.probe_tokens
        assert 1.35 * tokens / (model.batch_size * model.context) < 0.01 * planned.trial.steps
