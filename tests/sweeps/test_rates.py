"""Studies that take their learning rates from a file: which trial gets which, and what is one line."""

from __future__ import annotations

import json

import pytest
from sweeps_support import Notes, Workplace, run_study, write

from analysis.load import load_study as load_records
from attnres.cli import run_command
from attnres.rates_file import Optimum, Refusal, Target, write_rates_file
from sweeps import plan
from sweeps.executors import open_executor
from sweeps.study import describe
from sweeps.table import number

RULE = "attnres_block_n2"


def put(workplace: Workplace, kind: str, optima: list[tuple[str, str, float]], *refused: Refusal) -> None:
    target = Target(workplace.configs / "rates" / f"{kind}.yaml")
    chosen = [Optimum(size, rule, rate, {}) for size, rule, rate in optima]
    write_rates_file(target, kind, chosen, refused, {"study": "bracket"})  # type: ignore[arg-type]


def rates_of(workplace: Workplace, *words: str) -> dict[str, float]:
    study = workplace.study(*words)
    return {planned.cell: planned.trial.config.optim.learning_rate for planned in study.trials}


def test_a_shared_rate_is_each_sizes(workplace: Workplace) -> None:
    put(workplace, "shared", [("tiny_a", "prenorm", 0.0123449), ("tiny_b", "prenorm", 1e-5)])
    assert rates_of(workplace, "rates=shared") == {
        "tiny_a prenorm": 0.01234,
        f"tiny_a {RULE}": 0.01234,
        "tiny_b prenorm": 1e-5,
        f"tiny_b {RULE}": 1e-5,
    }
    assert set(rates_of(workplace).values()) == {4e-3}  # without the file: the model files'
    assert set(rates_of(workplace, "rates=none").values()) == {4e-3}
    assert rates_of(workplace, "rates=shared", "optim=muon")["tiny_a prenorm"] == 0.01234
    muon = workplace.study("rates=shared", "optim=muon").trials[0].trial.config.optim
    assert muon.peak_rate("block_matrices") == 0.01234


def test_a_trial_is_what_it_resolves_to(workplace: Workplace) -> None:
    """The file leaves no trace in a trial's id: the same rate given otherwise is the same trial."""
    put(workplace, "shared", [("tiny_a", "prenorm", 0.01)])
    by_file = workplace.study("rates=shared", "study.sizes=[tiny_a]")
    by_hand = workplace.study("optim.learning_rate=0.01", "study.sizes=[tiny_a]")
    assert [p.trial.id for p in by_file.trials] == [p.trial.id for p in by_hand.trials]
    assert describe(by_file)["rates"] == {"name": "shared", "kind": "shared", "study": "bracket"}
    assert describe(by_hand)["rates"] is None


def test_rates_of_another_budget_are_warned_of_and_a_plan_shows_rates(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = workplace.study("study.sizes=[tiny_a]").trials[0].trial.tokens
    target = Target(workplace.configs / "rates" / "found.yaml")
    for found, warned in (
        (tokens, False),
        (int(tokens * 1.05), False),
        (tokens * 2, True),
        (tokens // 2, True),
    ):
        target.path.unlink(missing_ok=True)
        optimum = Optimum("tiny_a", "prenorm", 0.0123, {"tokens": found})
        write_rates_file(target, "shared", [optimum], [], {"study": "bracket"})
        study = workplace.study("study.sizes=[tiny_a]", "rates=found")
        expected = [
            f"tiny_a prenorm, tiny_a {RULE}: rates=found were found at {number(found)} tokens, and these "
            f"trials have {number(tokens)}; the best rate depends on the budget"
        ]
        assert plan.warnings(study) == (expected if warned else [])
        plan.print_plan(study, plan.plan_rows(study, {}), each=False)
        out = capsys.readouterr().out
        noted = {"tiny_a": expected[0].partition("were ")[2].partition(";")[0]} if warned else None
        assert (describe(study)["rates"] or {}).get("other_budget") == noted
        assert " rate " in out and "0.0123" in out and (expected[0] in out) == warned
    for own in (
        {"tokens": "many"},
        {"tokens": True},
        {"tokens": 0},
        {"tokens": 10**400},
        {},
    ):  # a file by hand
        target.path.unlink()
        write_rates_file(target, "shared", [Optimum("tiny_a", "prenorm", 0.0123, own)], [], {})
        assert plan.warnings(workplace.study("study.sizes=[tiny_a]", "rates=found")) == []


def test_a_plan_names_the_budget_of_any_rule_that_has_another(workplace: Workplace) -> None:
    tokens = workplace.study("study.sizes=[tiny_a]").trials[0].trial.tokens
    target = Target(workplace.configs / "rates" / "own.yaml")
    optima = [
        Optimum("tiny_a", rule, 0.01, {"tokens": found})
        for rule, found in (("prenorm", 4 * tokens), (RULE, tokens))
    ]
    write_rates_file(target, "per_rule", optima, [], {"study": "bracket"})
    study = workplace.study("study.sizes=[tiny_a]", "rates=own")
    assert list(describe(study)["rates"]["other_budget"]) == ["tiny_a"]
    assert [line.partition(":")[0] for line in plan.warnings(study)] == ["tiny_a prenorm"]


@pytest.mark.slow
def test_each_rule_at_its_own_rate_trains_and_is_compared(workplace: Workplace) -> None:
    put(workplace, "per_rule", [("tiny_a", "prenorm", 0.01), ("tiny_a", RULE, 0.02)])
    study = workplace.study("rates=per_rule", "study.sizes=[tiny_a]", "budget.tokens=256")
    assert [p.trial.config.optim.learning_rate for p in study.trials] == [0.01, 0.02]
    notes: Notes = run_study(study, open_executor(study))
    assert sum("finished" in line for line in notes.lines) == 2
    data = load_records(workplace.runs, "tiny")
    assert list(data.table["learning_rate"]) == [0.01, 0.02]
    assert "learning rates are those of rates=per_rule (study bracket), each rule its own" in data.notes
    path = study.folder / "study.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "rates": None}))
    with pytest.raises(ValueError, match="optim.learning_rate is not the same within a size"):
        load_records(workplace.runs, "tiny")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rates=shared"], "rates=shared: has no rate for tiny_b: it was refused: at the edge"),
        (["rates=per_rule"], f"rates=per_rule: has no rate for tiny_a {RULE}: it has prenorm"),
        (
            ["rates=per_rule", "study.sizes=[tiny_b]"],
            "rates=per_rule: has no rate for tiny_b prenorm: it has tiny_a",
        ),
        (["rates=shard"], "rates=shard: did you mean shared?"),
        (["rates=shared", "optim.learning_rate=0.1"], "and optim.learning_rate is set by the study"),
        (["rates=shared", "study.axes.optim.learning_rate=[0.1,0.2]"], "and optim.learning_rate is set by"),
        (["rates=wrong"], "rates.rates.tiny_a=-1: must be a positive number"),
        (["rates=huge"], "must be a positive number"),
        (["rates=mixed"], "rates.rates.tiny_a=0.1: must map rules to rates, as kind=per_rule says"),
        (["rates=text"], "rates.rates.tiny_a='0.1': must be a positive number"),
        (["rates=nothing"], "rates.kind=none: and nothing has rates: kind is shared or per_rule"),
        (["rates=number"], "rates=number: 5 is not the name of a size or rule"),
        (
            ["rates=null_key"],
            "rates=null_key: one of these YAML files cannot be used: Incompatible key type 'NoneType'",
        ),
        (["rates="], "rates=: one of huge, mixed, none, nothing"),
        (["rates=other"], "its file must have the keys kind, rates, refused, source"),
    ],
)
def test_mistakes_are_one_line(
    workplace: Workplace, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(workplace, "shared", [("tiny_a", "prenorm", 0.01)], Refusal("tiny_b", "prenorm", "at the edge"))
    put(workplace, "per_rule", [("tiny_a", "prenorm", 0.01)])
    rest = "refused: []\nsource: {}\n"
    write(workplace.configs / "rates/huge.yaml", f"kind: shared\nrates: {{tiny_a: 1{'0' * 400}}}\n{rest}")
    write(workplace.configs / "rates/wrong.yaml", f"kind: shared\nrates: {{tiny_a: -1}}\n{rest}")
    write(workplace.configs / "rates/mixed.yaml", f"kind: per_rule\nrates: {{tiny_a: 0.1}}\n{rest}")
    write(workplace.configs / "rates/text.yaml", f"kind: shared\nrates: {{tiny_a: '0.1'}}\n{rest}")
    write(workplace.configs / "rates/nothing.yaml", f"kind: none\nrates: {{tiny_a: 0.1}}\n{rest}")
    write(workplace.configs / "rates/number.yaml", f"kind: shared\nrates: {{tiny_a: 0.1, 5: 1}}\n{rest}")
    write(workplace.configs / "rates/null_key.yaml", f"kind: shared\nrates: {{tiny_a: 0.1, null: 1}}\n{rest}")
    write(workplace.configs / "rates/other.yaml", "tiny_a: 0.1\n")
    assert run_command(plan.main, [*workplace.arguments(*words), "--no-calibrate"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
