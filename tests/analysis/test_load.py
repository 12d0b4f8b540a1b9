"""Loading a study: one row per trial, and one clear line for everything that spoils a comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.load import load_study
from analysis.results import compute_results
from analysis.simulate import Truth, simulate_table, write_study
from attnres.errors import UserError

Edit = Callable[[dict[str, Any]], None]


def make(runs: Path, truth: Truth | None = None) -> Path:
    """A simulated study `s` of 4 sizes x 2 rules x 2 seeds."""
    folder = runs / "s"
    write_study(folder, simulate_table(truth or Truth(sizes=4, seeds=2), np.random.default_rng(0)))
    return folder


def record_of(folder: Path, size: str, rule: str, seed: int = 0) -> Path:
    plan = json.loads((folder / "study.json").read_text())
    (trial,) = [t for t in plan["trials"] if (t["size"], t["rule"], t["seed"]) == (size, rule, seed)]
    return folder / trial["id"] / "record.json"


def edit(path: Path, change: Edit) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def refusal(runs: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_study(runs, "s", **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_one_row_per_trial(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "stray").mkdir()
    (folder / "stray" / "record.json").write_text("{torn")
    data = load_study(tmp_path, "s")
    assert len(data.table) == 16
    assert data.rules == ("prenorm", "attnres_block")
    assert data.notes == ("ignored, not in the plan: 1 record: stray",)
    row = data.table.iloc[0]
    assert row["compute"] == row["compute_total"] == pytest.approx(1e13)
    assert load_study(tmp_path, "s", convention="6nd").table["compute"].iloc[0] == row["compute_6nd"]
    assert (data.table["train_seconds"] > 0).all()


def test_no_study(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path)
    (tmp_path / "s").mkdir()
    assert "study.json: is missing" in refusal(tmp_path)
    (tmp_path / "s" / "study.json").write_text('{"trials": [')
    assert "torn or not JSON" in refusal(tmp_path)
    (tmp_path / "s" / "study.json").write_text('{"trials": []}')
    assert "needs a baseline and a list of trials" in refusal(tmp_path)


def test_no_records(tmp_path: Path) -> None:
    for path in make(tmp_path).glob("*/record.json"):
        path.unlink()
    assert "no records in" in refusal(tmp_path) and "16 planned" in refusal(tmp_path)


def test_missing_cell(tmp_path: Path) -> None:
    record_of(make(tmp_path), "size2", "attnres_block", 1).unlink()
    text = refusal(tmp_path)
    assert "study=s: 1 of 16 trials have no record: size2-attnres_block-s1-" in text
    assert "--allow missing" in text
    data = load_study(tmp_path, "s", allow=["missing"])
    assert len(data.table) == 15
    assert data.let_pass[0].startswith("missing: 1 of 16")
    result = compute_results(data, draws=100)
    assert any("without a partner" in note and note.endswith(": 1 trial") for note in result.notes)


def test_an_arm_without_a_size(tmp_path: Path) -> None:
    folder = make(tmp_path, Truth(sizes=3, seeds=1))
    record_of(folder, "size2", "attnres_block").unlink()
    assert "have no record: size2-attnres_block" in refusal(tmp_path)
    data = load_study(tmp_path, "s", allow=["missing"])
    with pytest.raises(UserError, match=r"rule=attnres_block: 2 sizes \(size1, size3\)"):
        compute_results(data)


def test_an_arm_that_was_not_planned_for_a_size(tmp_path: Path) -> None:
    folder = make(tmp_path)
    plan = json.loads((folder / "study.json").read_text())
    plan["trials"] = [t for t in plan["trials"] if (t["size"], t["rule"]) != ("size3", "attnres_block")]
    (folder / "study.json").write_text(json.dumps(plan))
    assert "size3 attnres_block seed 0, size3 attnres_block seed 1" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "diverged",
            lambda r: r.update(status="diverged", reason="loss is nan", validation=None),
            "1 of 16 trials diverged: size1-prenorm-s0-",
        ),
        (
            "failed",
            lambda r: r.update(status="failed", reason="disk"),
            "1 of 16 trials failed: size1-prenorm-s0-",
        ),
        ("unfinished", lambda r: r.update(schedule_complete=False), "trials ended before their schedule"),
        ("mixed_data", lambda r: r["data"].update(fingerprint="other"), "other in 1"),
        ("mixed_validation", lambda r: r["data"].update(validation_fingerprint="x"), "validation set"),
        ("torn", lambda r: r.pop("loss", r.pop("steps")), "record.json: steps: is missing"),
    ],
)
def test_trials_that_do_not_count(tmp_path: Path, kind: str, change: Edit, message: str) -> None:
    folder = make(tmp_path)
    edit(record_of(folder, "size1", "prenorm"), change)
    text = refusal(tmp_path)
    assert message in text
    assert f"--allow {kind}" in text
    allow = [kind, "missing"] if kind == "torn" else [kind]
    data = load_study(tmp_path, "s", allow=allow)
    assert data.let_pass[0].startswith(f"{kind}: ")
    kept = kind in ("unfinished", "mixed_data", "mixed_validation")
    assert len(data.table) == (16 if kept else 15)


def config(**groups: Any) -> Edit:
    return lambda record: record["config"].update(groups)


SETTINGS = {
    "model": {"width": 64, "norm_eps": 1e-8, "batch_size": 8},
    "optim": {"learning_rate": 0.004, "beta2": 0.95},
    "schedule": {"name": "cosine", "warmup_fraction": 0.02},
    "data": {"validation_tokens": 262144, "interim_validation_tokens": 32768, "path": None},
    "runtime": {"dtype": "float32", "threads": 1, "microbatch_size": None, "compile": False},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["config"]["model"].update(norm_eps=1e-9), "model.norm_eps .*1e-08 in 3, 1e-09 in 1"),
        (lambda r: r["config"]["optim"].update(beta2=0.99), "optim.beta2 .*0.95 in 3, 0.99 in 1"),
        (lambda r: r["config"]["schedule"].update(name="wsd"), "schedule.name .*cosine in 3, wsd in 1"),
        (lambda r: r["config"]["data"].update(interim_validation_tokens=1), "data.interim_validation_tokens"),
        (lambda r: r["config"]["runtime"].update(dtype="bfloat16"), "runtime.dtype .*float32 in 3, bfloat16"),
        (lambda r: r["config"].pop("optim"), "optim.learning_rate .*0.004 in 3, absent in 1"),
        (lambda r: r.update(planned_steps=99), "planned_steps .*100 in 3, 99 in 1"),
        (lambda r: r.update(planned_tokens=1), "planned_tokens"),
        (lambda r: r.update(learning_rate=0.008), "learning_rate .*0.004 in 3, 0.008 in 1"),
        (lambda r: r["environment"].update(device="cuda"), "environment.device .*cpu in 3, cuda in 1"),
        (lambda r: r["environment"].update(dtype="bfloat16"), "environment.dtype .*absent in 3, bfloat16"),
    ],
)
def test_trials_of_a_size_differ_in_the_rule_only(tmp_path: Path, change: Edit, words: str) -> None:
    folder = make(tmp_path)
    for path in folder.glob("*/record.json"):
        edit(path, config(**SETTINGS))
    assert load_study(tmp_path, "s").let_pass == ()
    edit(record_of(folder, "size2", "attnres_block", 1), change)
    text = refusal(tmp_path)
    assert re.search(f"study=s: {words}.*: size2-attnres_block-s1", text), text
    assert "--allow mixed_settings" in text
    data = load_study(tmp_path, "s", allow=["mixed_settings"])
    assert len(data.table) == 16
    assert data.let_pass[0].startswith("mixed_settings: ")


def test_settings_that_do_not_matter_and_sizes_may_differ(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for path in folder.glob("*/record.json"):
        edit(path, config(**SETTINGS))
    edit(record_of(folder, "size1", "prenorm"), lambda r: r["config"]["data"].update(path="elsewhere"))
    edit(record_of(folder, "size1", "prenorm"), lambda r: r["config"]["model"].update(learning_rate=1.0))
    for rule in ("prenorm", "attnres_block"):
        for seed in (0, 1):
            path = record_of(folder, "size3", rule, seed)
            edit(path, lambda r: r["config"]["model"].update(width=96))
    assert load_study(tmp_path, "s").let_pass == ()


def test_a_declared_axis_may_differ_where_the_plan_says_so(tmp_path: Path) -> None:
    """Each rule at a rate of its own, as the plan lists; another key may still not differ."""
    table = simulate_table(Truth(sizes=4, seeds=2), np.random.default_rng(0))
    table["optim.learning_rate"] = np.where(table["rule"] == "prenorm", 0.004, 0.006)
    write_study(tmp_path / "s", table, axes="optim.learning_rate")
    assert len(load_study(tmp_path, "s").table) == 16
    edit(record_of(tmp_path / "s", "size1", "prenorm"), lambda r: r.update(planned_steps=7))
    assert "planned_steps" in refusal(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("size", "size4"), ("rule", "mhc"), ("seed", 9)])
def test_a_record_that_the_plan_contradicts(tmp_path: Path, key: str, value: object) -> None:
    edit(record_of(make(tmp_path), "size1", "prenorm"), lambda r: r.update({key: value}))
    text = refusal(tmp_path)
    assert f"says {key}={value}, the plan {key}=" in text and "disagree with study.json" in text


def test_mixed_software_is_noted(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for path in folder.glob("*/record.json"):
        edit(path, lambda r: r["environment"].update(torch="2.13.0"))
    assert load_study(tmp_path, "s").notes == ()
    change = {"torch": "2.14.0", "commit": "abc"}
    edit(record_of(folder, "size1", "prenorm"), lambda r: r["environment"].update(change))
    torch, commit = load_study(tmp_path, "s").notes
    assert "2 versions of torch (2.13.0, 2.14.0)" in torch
    assert "2 commits of the code (abc, simulated)" in commit


def test_torn_record_is_named(tmp_path: Path) -> None:
    path = record_of(make(tmp_path), "size1", "prenorm")
    path.write_text(path.read_text()[:100])
    text = refusal(tmp_path)
    assert str(path) in text and "torn" in text


def test_record_in_the_wrong_folder(tmp_path: Path) -> None:
    edit(record_of(make(tmp_path), "size1", "prenorm"), lambda r: r.update(trial_id="elsewhere"))
    assert "says trial_id=elsewhere" in refusal(tmp_path)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, -1.0])
def test_losses_that_are_none(tmp_path: Path, loss: object) -> None:
    edit(record_of(make(tmp_path), "size1", "prenorm"), lambda r: r["validation"].update(loss_nats=loss))
    assert "size1-prenorm-s0" in refusal(tmp_path)
    assert "must be finite and positive" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["validation"].update(loss_nats="2.0"), "validation.loss_nats='2.0': wrong type"),
        (lambda r: r["validation"].clear(), "validation.loss_nats: is missing"),
        (lambda r: r["validation"].update(loss_nats=True), "validation.loss_nats=True: wrong type"),
        (lambda r: r["validation"].update(loss_nats=None), "validation.loss_nats: is missing"),
        (lambda r: r["parameters"].update(total=True), "parameters.total=True: wrong type"),
        (lambda r: r.update(tokens=True), "tokens=True: wrong type"),
        (lambda r: r["data"].update(fingerprint=[1]), "data.fingerprint=[1]: wrong type"),
        (lambda r: r["config"].update(runtime="x"), "config.runtime='x': wrong type"),
        (lambda r: r["config"].update(residual=["x"]), "config.residual=['x']: wrong type"),
        (lambda r: r["training_flops"].update(total="1"), "training_flops.total='1': wrong type"),
        (lambda r: r["timing"].update(attempts={}), "timing.attempts={}: wrong type"),
        (lambda r: r["environment"].update(device=[]), "environment.device=[]: wrong type"),
    ],
)
def test_a_record_with_parts_of_another_kind_is_torn(tmp_path: Path, change: Edit, said: str) -> None:
    edit(record_of(make(tmp_path), "size1", "prenorm"), change)
    assert said in refusal(tmp_path)
    assert len(load_study(tmp_path, "s", allow=["torn", "missing"]).table) == 15


def test_few_sizes_and_one_compute_give_no_multiplier(tmp_path: Path) -> None:
    make(tmp_path, Truth(sizes=2))
    data = load_study(tmp_path, "s")
    assert data.no_multiplier == "study=s: 2 sizes (size1, size2): a comparison needs 3"
    assert not data.wants_multiplier
    with pytest.raises(UserError, match=r"2 sizes \(size1, size2\): a comparison needs 3"):
        compute_results(data)
    table = simulate_table(Truth(), np.random.default_rng(0)).assign(compute=1e13)
    write_study(tmp_path / "flat", table)
    with pytest.raises(UserError, match=r"compute=1e\+13 FLOP at every size"):
        compute_results(load_study(tmp_path, "flat"))


def test_settings_that_do_not_exist(tmp_path: Path) -> None:
    make(tmp_path)
    assert "--allow=everything: one of missing" in refusal(tmp_path, allow=["everything"])
    assert "convention=7nd: one of total" in refusal(tmp_path, convention="7nd")
    assert "baseline=mhc: is not a rule" in refusal(tmp_path, baseline="mhc")
    assert "the axes of this study are none" in refusal(tmp_path, where={"optim.learning_rate": "1"})
    swapped = load_study(tmp_path, "s", baseline="attnres_block")
    assert swapped.rules == ("attnres_block", "prenorm")


def test_one_rule_is_nothing_to_compare(tmp_path: Path) -> None:
    table = simulate_table(Truth(), np.random.default_rng(0))
    write_study(tmp_path / "s", table[table["rule"] == "prenorm"])
    assert "there is nothing to compare it with" in refusal(tmp_path)


def learning_rates(runs: Path) -> pd.DataFrame:
    """Two rates; 0.004 is better for the baseline, 0.006 for the rule."""
    base = simulate_table(Truth(sizes=4, seeds=2, noise=0.0005), np.random.default_rng(0))
    tables = []
    for rate, better in ((0.004, "prenorm"), (0.006, "attnres_block")):
        factor = np.where(base["rule"] == better, 1.0, 1.01)
        tables.append(base.assign(loss=base["loss"] * factor, rate=rate))
    table = pd.concat(tables, ignore_index=True).rename(columns={"rate": "optim.learning_rate"})
    write_study(runs / "s", table, axes="optim.learning_rate")
    return table


def test_an_axis_needs_a_choice(tmp_path: Path) -> None:
    learning_rates(tmp_path)
    text = refusal(tmp_path)
    assert "optim.learning_rate has the values 0.004, 0.006; choose one" in text
    assert 'where="optim.learning_rate=0.004"' in text
    assert "no trial has it; the values are 0.004, 0.006" in refusal(
        tmp_path, where={"optim.learning_rate": "0.005"}
    )
    data = load_study(tmp_path, "s", where={"optim.learning_rate": "4e-3"})
    assert set(data.table["learning_rate"]) == {0.004}
    assert len(data.table) == 16 and len(data.tuned) == 32


def test_learning_rates_in_the_sensitivity_table(tmp_path: Path) -> None:
    learning_rates(tmp_path)
    data = load_study(tmp_path, "s", where={"optim.learning_rate": "0.004"})
    (rule,) = compute_results(data, draws=100).rules.values()
    found = {
        row.learning_rate: row.multiplier
        for row in rule.sensitivity
        if row.changed in ((), ("learning_rate",))
    }
    assert set(found) == {"shared", "own best", "all at 0.006"}
    worth = 1.01 ** (1 / 0.057)  # 1 % of loss as compute
    assert found["own best"] == pytest.approx(1.25, rel=0.03)
    assert found["shared"] == pytest.approx(1.25 / worth, rel=0.03)
    assert found["all at 0.006"] == pytest.approx(1.25 * worth, rel=0.03)


def test_torn_records_are_let_pass_by_that_word_alone(tmp_path: Path) -> None:
    path = record_of(make(tmp_path), "size1", "prenorm", 1)
    path.write_text(path.read_text()[:100])
    data = load_study(tmp_path, "s", allow=["torn"])
    assert len(data.table) == 15
    assert [line.partition(":")[0] for line in data.let_pass] == ["torn"]
    record_of(tmp_path / "s", "size2", "prenorm").unlink()
    with pytest.raises(UserError, match=r"1 of 16 trials have no record: size2-prenorm-s0"):
        load_study(tmp_path, "s", allow=["torn"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.update(trials=[1, 2]), "trials: 1: each must be an object"),
        (lambda plan: plan["trials"][0].update(id=["a"]), r"trials: id=\['a'\]: is of the wrong type"),
        (lambda plan: plan["trials"][0].update(seed=True), "trials: seed=True: is of the wrong type"),
        (lambda plan: plan["trials"][0].update(axes="x"), "trials: axes='x': is of the wrong type"),
        (lambda plan: plan.update(baseline=["prenorm"]), "needs a baseline and a list of trials"),
        (lambda plan: plan.update(claims={"a": 1}), "claims=.*: is of the wrong type"),
        (lambda plan: plan.update(claims=[1]), "claims=1: each needs a name"),
        (lambda plan: plan.update(too_small=[1]), "too_small=.*: is of the wrong type"),
    ],
)
def test_a_plan_malformed_by_hand(tmp_path: Path, change: Edit, message: str) -> None:
    edit(make(tmp_path) / "study.json", change)
    assert re.search(message, refusal(tmp_path))


def test_records_of_another_seed_are_named_where_the_plans_are_missing(tmp_path: Path) -> None:
    """A launch with other seeds makes a plan of these alone; the finished trials are still there."""
    folder = make(tmp_path)
    plan = json.loads((folder / "study.json").read_text())
    for trial in plan["trials"]:
        trial.update(id=f"{trial['id'][:8]}beef", seed=trial["seed"] + 2)
    (folder / "study.json").write_text(json.dumps(plan))
    line = refusal(tmp_path)
    assert "16 of 16 trials have no record" in line
    assert "; 16 other trial folders are not in this plan: seed 0, 1 where the plan has 2, 3; " in line
    assert line.endswith("and with both (study.seeds=[0,1,2,3], say), has them again")


def test_trials_without_a_study_are_pointed_to_their_wandb_files(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "study.json").unlink()
    assert refusal(tmp_path).endswith("study.json: is missing; python -m sweeps.launch study=s writes it")
    log = folder / "wandb" / "offline-run-1" / "run-1.wandb"
    log.parent.mkdir(parents=True)
    log.touch()
    assert refusal(tmp_path).endswith(f"python -m analysis.report source=wandb:{folder}")


def test_records_that_are_ignored_are_described(tmp_path: Path) -> None:
    folder = make(tmp_path)
    plan = json.loads((folder / "study.json").read_text())
    kept = [trial for trial in plan["trials"] if trial["seed"] == 0]
    (folder / "study.json").write_text(json.dumps({**plan, "trials": kept}))
    (note,) = load_study(tmp_path, "s").notes
    assert note.startswith("ignored, not in the plan: 8 records (seed 1 where the plan has 0): ")


def test_rates_of_another_budget_are_a_caveat(tmp_path: Path) -> None:
    folder = make(tmp_path)
    rates = {"name": "r", "kind": "shared", "study": "t", "other_budget": {"a": "found at 1 k tokens"}}
    edit(folder / "study.json", lambda plan: plan.update(rates=rates))
    assert "a: rates=r was found at 1 k tokens; the best rate depends on the budget" in (
        load_study(tmp_path, "s").notes
    )
    edit(folder / "study.json", lambda plan: plan["rates"].update(other_budget=["a"]))  # by hand
    assert len(load_study(tmp_path, "s").notes) == 1
