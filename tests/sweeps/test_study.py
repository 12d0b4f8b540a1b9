"""From a study's YAML to its trials: what resolves, what is equal, and what is refused."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from sweeps_support import STUDY, Workplace, write, write_configs

from attnres.config import to_mapping
from attnres.data.corpus import open_corpus
from attnres.errors import ConfigError, UserError
from sweeps.study import describe, load_study, write_study


def test_each_context_has_a_validation_set_of_its_own(shared_workplace: Workplace) -> None:
    study = shared_workplace.study("study.axes.model.context=[16,32]", "study.sizes=[tiny_a]")
    for planned in study.trials:
        config = planned.trial.config
        alone = open_corpus(config.data, config.model.context)
        assert planned.corpus.validation_fingerprint == alone.validation_fingerprint
    assert len({planned.corpus.validation_fingerprint for planned in study.trials}) == 2


def test_the_plan_tells_its_overrides(shared_workplace: Workplace) -> None:
    assert "budget.tokens=2560" in describe(shared_workplace.study())["overrides"]


def test_trials_of_a_size_differ_in_the_rule_and_the_seed_only(shared_workplace: Workplace) -> None:
    study = shared_workplace.study("study.seeds=[0,1]")
    for _, members in groupby(study.trials, key=lambda planned: planned.size):
        seen = []
        for planned in members:
            mapping = to_mapping(planned.trial.config)
            seen.append((mapping.pop("residual")["rule"], mapping.pop("seed")))
            trial = planned.trial
            resolved = (trial.steps, trial.batch_tokens, trial.evaluation_steps, trial.data_fingerprint)
            seen[-1] += (json.dumps(mapping), resolved)
        assert len({(mapping, resolved) for _, _, mapping, resolved in seen}) == 1
        pairs = [(rule, seed) for rule, seed, *_ in seen]
        assert pairs == [("prenorm", 0), ("prenorm", 1), ("attnres_block", 0), ("attnres_block", 1)]


def test_a_rule_file_that_changes_more_than_the_rule_is_refused(workplace: Workplace) -> None:
    text = "# @package _global_\nresidual: {rule: prenorm}\nmodel: {batch_size: 4}\n"
    write(workplace.configs / "residual" / "sly.yaml", text)
    with pytest.raises(ConfigError, match=r"study\.rules=.*model\.batch_size=4"):
        workplace.study("study.rules=[{rule: attnres_block, num_blocks: 2},sly]", "study.baseline=prenorm")


def test_axes_multiply_the_grid_and_are_in_the_plan(shared_workplace: Workplace) -> None:
    study = shared_workplace.study(
        "study.sizes=[tiny_a]",
        "study.rules=[prenorm]",
        "study.axes.optim.learning_rate=[1e-3,2e-3]",
        "study.axes.schedule=[cosine,wsd]",
    )
    assert len(study.trials) == 2 * 2
    rates = {
        planned.axes["optim.learning_rate"]: planned.trial.config.optim.learning_rate
        for planned in study.trials
    }
    assert rates == {1e-3: 1e-3, 2e-3: 2e-3}
    assert {planned.axes["schedule"] for planned in study.trials} == {"cosine", "wsd"}
    assert describe(study)["trials"][0]["axes"] == {"optim.learning_rate": 1e-3, "schedule": "cosine"}


def test_the_command_line_wins_over_the_study(shared_workplace: Workplace) -> None:
    assert {
        planned.trial.tokens
        for planned in shared_workplace.study("study.rules=[prenorm]", "budget.tokens=640").trials
    } == {640}
    # Choosing a group replaces what the study set inside it.
    study = shared_workplace.study(
        "study.rules=[prenorm]", "budget=tokens_per_parameter", "budget.tokens_per_parameter=1"
    )
    assert len({planned.trial.tokens for planned in study.trials}) == 2


def test_settings_of_this_machine_do_not_change_ids(shared_workplace: Workplace) -> None:
    ids = [planned.trial.id for planned in shared_workplace.study("study.sizes=[tiny_a]").trials]
    other = shared_workplace.study(
        "study.sizes=[tiny_a]", "launch.workers=7", "runtime.threads=3", "tracking=wandb_offline"
    )
    assert [planned.trial.id for planned in other.trials] == ids
    assert other.workers == 7


def test_study_json_is_what_the_analysis_reads(workplace: Workplace) -> None:
    study = workplace.study()
    plan = json.loads(write_study(study).read_text())
    assert plan["baseline"] == "prenorm"
    assert [trial["rule"] for trial in plan["trials"]] == ["prenorm", "attnres_block_n2"] * 2
    first = study.trials[0]
    assert plan["trials"][0] == {
        "id": first.trial.id,
        "name": first.trial.name,
        "size": "tiny_a",
        "rule": "prenorm",
        "seed": 0,
        "axes": {},
        "parameters": first.trial.counts.non_embedding_parameters,
        "tokens": 2560,
        "steps": first.trial.steps,
        "flops": first.trial.counts.flops_per_token * 2560,
    }


REFUSED = [
    (["study.sizes=[tiny_c]"], "study.sizes=tiny_c: did you mean tiny_"),
    (["study.sizes=[]"], "study.sizes=[]: is empty"),
    (["study.sizes=[tiny_a,tiny_a]"], "study.sizes=tiny_a: is given twice"),
    (["study.sizes=tiny_a"], "study.sizes=tiny_a: must be a list"),
    (["study.seeds=[0,0]"], "study.seeds=0: is given twice"),
    (["study.seeds=[]"], "study.seeds=[]: is empty"),
    (["study.seeds=[-1]"], "seed=-1: must be in [0, 2^32)"),
    (["study.seeds=[zero]"], "study.seeds[0]=zero: must be a whole number"),
    (["study.rules=[prenorm,attnres_blok]"], "study.rules=attnres_blok: did you mean attnres_block?"),
    (["study.rules=[prenorm,{rule: attnres_block, nun_blocks: 2}]"], "residual.nun_blocks=2: unknown key"),
    (["study.rules=[prenorm,{num_blocks: 2}]"], "study.rules={'num_blocks': 2}: a rule is a name, or {rule:"),
    (["study.rules=[prenorm,{rule: attnres_block, num_blocks: 9}]"], "residual.num_blocks=9: is more than"),
    (
        ["study.rules=[prenorm,attnres_block,{rule: attnres_block, num_blocks: 8}]", "model.depth=8"],
        "study.rules=",
    ),
    (
        ["study.baseline=attnres"],
        "study.baseline=attnres: is not a rule of this study: prenorm, attnres_block_n2",
    ),
    (["study.name=../elsewhere"], "study.name=../elsewhere: use 1 to 64 letters"),
    (["study.name=.hidden"], "study.name=.hidden: use 1 to 64 letters"),
    (["study.axes.optim.beta1=[]"], "study.axes.optim.beta1=[]: is empty"),
    (["study.axes.optim.beta1=0.9"], "study.axes.optim.beta1=0.9: must be a list of values"),
    (["study.axes.optim.beta1=[0.9,0.9]"], "study.axes.optim.beta1=0.9: is given twice"),
    (["study.axes.optim.beta1=[0.9,abc]"], "optim.beta1=abc: must be a number"),
    (["study.axes.optim.betta=[0.9,0.8]"], "optim.betta=0.9: unknown key"),
    (["study.axes.seed=[1,2]"], "study.axes.seed=[1, 2]: is not an axis: choose seeds with study.seeds"),
    (["study.axes.residual.num_blocks=[1,2]"], "is not an axis: choose rules with study.rules"),
    (["study.axes.runtime.threads=[1,2]"], "is the same trial as (tiny_a prenorm runtime.threads=1 seed=0)"),
    (["study.axes.optim.beta1=[0.9,0.8]", "optim.beta1=0.7"], "optim.beta1=0.7: is an axis of this study"),
    (["study.claims=[{name: none, multiplier: 0}]"], "study.claims=0.0: a multiplier must be positive"),
    (["study.sede=[0]"], "study.sede=[0]: unknown key"),
    (["launch.workers=0"], "launch.workers=0: must be positive"),
    (["launch.workers=two"], "launch.workers=two: must be a whole number"),
    (["launch.threads=2"], "launch.threads=2: threads of a trial are runtime.threads"),
    (["launch.max_retries=-1"], "launch.max_retries=-1: must not be negative"),
    (["lunch.workers=2"], "lunch.workers=2: unknown key"),
    (["seed=1"], "seed=1: cannot be set for all trials: choose seeds with study.seeds"),
    (["model=tiny_a"], "model=tiny_a: cannot be set for all trials: choose sizes with study.sizes"),
    (["residual=prenorm"], "residual=prenorm: cannot be set for all trials: choose rules"),
    (["study_name=other"], "study_name=other: cannot be set for all trials"),
    (["optim.lrr=1"], "optim.lrr=1: unknown key"),
    (["+optim.lrr=1"], "+optim.lrr=1: keys are fixed"),
    (["study=tinny"], "study=tinny: did you mean tiny?"),
]


@pytest.mark.parametrize(("overrides", "line"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_mistakes_are_one_line_with_field_and_value(
    overrides: list[str], line: str, shared_workplace: Workplace
) -> None:
    with pytest.raises(UserError) as caught:
        shared_workplace.study(*overrides)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


IN_FILES = [
    ("purpose: A study for tests.", "porpoise: x", "study.porpoise=x: unknown key"),
    ("seeds: [0]", "", "study.seeds=None: is missing"),
    ("seeds: [0]", "seeds: [0", "tiny.yaml"),
    ("tracking=none]", "tracking=nonne]", "tracking=nonne: did you mean none?"),
    ("tracking=none]", "seed=3]", "seed=3: cannot be set for all trials"),
    ("tracking=none]", "tracking]", "tracking: not an override"),
    ("seeds: [0]", "seeds: [0]\naxes: [1]", "study/tiny"),
]


@pytest.mark.parametrize(("old", "new", "line"), IN_FILES, ids=[new or "missing" for _, new, _ in IN_FILES])
def test_mistakes_in_a_study_file(old: str, new: str, line: str, workplace: Workplace) -> None:
    write_configs(workplace.configs, STUDY.replace(old, new))
    with pytest.raises(UserError) as caught:
        workplace.study()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_study_lists_the_studies() -> None:
    with pytest.raises(UserError, match="choose a study: ablation, .*smoke"):
        load_study([])


def test_a_size_file_must_be_named_after_its_size(workplace: Workplace) -> None:
    copy = (workplace.configs / "model" / "tiny_a.yaml").read_text()
    write(workplace.configs / "model" / "copied.yaml", copy)
    with pytest.raises(ConfigError, match="study.sizes=copied: its file says name: tiny_a"):
        workplace.study("study.sizes=[copied]")


def test_runs_dir_may_hold_any_character(workplace: Workplace) -> None:
    folder = Path(workplace.root) / "it's, my runs = {x}"
    quoted = str(folder).replace("'", "\\'")
    study = workplace.study(f"runs_dir='{quoted}'")
    assert study.trials[0].trial.folder.parent == folder / "tiny"


def test_a_study_is_named_after_its_file(tmp_path: Path, shared_workplace: Workplace) -> None:
    configs = write_configs(tmp_path / "configs")
    write(configs / "study" / "copied.yaml", STUDY)
    with pytest.raises(ConfigError, match="study.name=tiny: its file is copied.yaml"):
        load_study(["study=copied", *shared_workplace.overrides()], str(configs))
    renamed = load_study(["study=copied", "study.name=copied", *shared_workplace.overrides()], str(configs))
    assert renamed.folder.name == "copied"


DEEP = "{size: deep, base: tiny_a, depth: 4, budget.tokens: 1280}"


def test_a_size_can_be_another_one_with_other_values(shared_workplace: Workplace) -> None:
    write_configs(shared_workplace.configs, STUDY.replace(", budget.tokens=2560", ""))
    study = shared_workplace.study(f"study.sizes=[{DEEP}]", "study.rules=[prenorm]")
    (planned,) = study.trials
    assert (planned.size, planned.trial.config.model.name) == ("deep", "deep")
    assert (planned.trial.config.model.depth, planned.trial.config.model.width) == (4, 8)
    assert planned.trial.tokens == 1280
    # The command line wins over a size, too.
    (planned,) = shared_workplace.study(
        f"study.sizes=[{DEEP}]", "study.rules=[prenorm]", "budget.tokens=640"
    ).trials
    assert planned.trial.tokens == 640
    # A group that it chooses replaces all that a size sets in the group.
    whole = ("budget=tokens_per_parameter", "budget.tokens_per_parameter=2")
    (planned,) = shared_workplace.study(f"study.sizes=[{DEEP}]", "study.rules=[prenorm]", *whole).trials
    assert planned.trial.config.budget.tokens is None
    write_configs(shared_workplace.configs)


@pytest.mark.parametrize(
    ("size", "line"),
    [
        ("{size: deep, base: tiny_z}", "study.sizes=tiny_z: did you mean tiny_"),
        ("{base: tiny_a}", "a size is a name, or {size: name, base: name, key: value}"),
        ("{size: deep, base: tiny_a, dept: 4}", "model.dept=4: unknown key; did you mean model.depth?"),
        ("{size: deep, base: tiny_a, residual.rule: prenorm}", "study.sizes=deep: cannot set residual.rule"),
        ("{size: deep, base: tiny_a, budget.tokens: 8}", "budget.tokens=2560: is given twice"),
        ("tiny_a,{size: tiny_a, depth: 4}", "study.sizes=tiny_a: is given twice"),
    ],
)
def test_mistakes_in_a_size(size: str, line: str, shared_workplace: Workplace) -> None:
    with pytest.raises(UserError) as caught:
        shared_workplace.study(f"study.sizes=[{size}]")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
