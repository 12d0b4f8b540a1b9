"""Random and Bayesian search: asks nothing twice, trains nothing twice, tells what the records say."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeps_support import Workplace, write

from attnres.cli import run_command
from attnres.lock import TrialLock
from sweeps import search
from sweeps.state import TrialState, read_state

# Optuna's numbers for the lines of its journal: a suggestion, a suggested value, an answer.
CREATE_TRIAL, SET_PARAM, SET_STATE = 4, 5, 6
SPACE = "name: rate\nspace:\n  optim.learning_rate: {low: 1.0e-3, high: 1.0, log: true}\n"
MORE = """
name: more
sampler: random
trials: 12
space:
  optim.beta2: {choices: [0.9, 0.95]}
  model.batch_size: {low: 1, high: 2}
  schedule: {choices: [cosine, wsd]}
"""


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    write(workplace.configs / "search/rate.yaml", SPACE)
    write(workplace.configs / "search/more.yaml", MORE)
    return workplace


def words(place: Workplace, *more: str) -> list[str]:
    kind = [] if any(word.startswith("search=") for word in more) else ["search=rate"]
    return place.arguments("study.sizes=[tiny_a]", "budget.tokens=128", "budget.evaluations=1", *kind, *more)


def found(place: Workplace, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    capsys.readouterr()
    assert run_command(search.main, [*words(place, *more), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def values(cell: dict[str, Any]) -> list[float]:
    ordered = sorted(cell["suggestions"], key=lambda one: one["number"])
    return [one["values"]["optim.learning_rate"] for one in ordered]


def pretend(monkeypatch: pytest.MonkeyPatch, place: Workplace, says: Callable[[float], TrialState]) -> None:
    """Trials have ended as `says` has it of their rate; none is started."""
    rates: dict[Path, float] = {}
    real = search.resolve

    def resolve(config: Any, corpus: Any) -> Any:
        trial = real(config, corpus)
        rates[trial.folder] = config.optim.learning_rate
        return trial

    monkeypatch.setattr(search, "resolve", resolve)
    monkeypatch.setattr(search, "read_state", lambda folder: says(rates[folder]))


def bowl(rate: float) -> TrialState:
    return TrialState("finished", loss_nats=2 + math.log(rate / 0.05) ** 2)


@pytest.mark.slow
def test_suggestions_are_trials_and_are_trained_once(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(
        place, "search.trials=2", "study.rules=[prenorm]", "study.seeds=[0,1]", "launch.workers=2"
    )
    assert run_command(search.main, command) == 0
    out = capsys.readouterr().out
    assert "tiny_a prenorm: 2 of 2 suggestions, 2 of them distinct: 2 finished" in out
    folder = place.runs / "tiny-rate"
    (cell,) = json.loads((folder / "search/search.json").read_text())["cells"]
    for one in cell["suggestions"]:
        records = [json.loads((folder / trial / "record.json").read_text()) for trial in one["trials"]]
        assert [record["seed"] for record in records] == [0, 1]
        assert {record["learning_rate"] for record in records} == {one["values"]["optim.learning_rate"]}
        losses = [record["validation"]["loss_nats"] for record in records]
        assert one["loss_nats"] == pytest.approx(sum(losses) / 2, abs=1e-12)
    assert run_command(search.main, [word.replace("trials=2", "trials=3") for word in command]) == 0
    states = [read_state(path.parent) for path in folder.glob("*/record.json")]
    assert len(states) == 6 and {state.attempts for state in states} == {1}


@pytest.mark.slow
def test_a_killed_search_goes_on_with_what_it_had_asked(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    straight = ("search.trials=14", "study.name=straight", "search.batch=3", "search.startup=4")
    assert run_command(search.main, words(place, *straight)) == 0
    expected = found(place, capsys, *straight)
    broken = ("search.trials=14", "study.name=broken", "search.batch=3", "search.startup=4")
    tell = search.Journal.tell
    told = 0

    def die(self: Any, *arguments: Any, **more: Any) -> None:
        nonlocal told
        told += 1
        if told % 5 == 0:
            raise KeyboardInterrupt
        tell(self, *arguments, **more)

    monkeypatch.setattr(search.Journal, "tell", die)
    codes = []
    while not codes or codes[-1] == 130:
        codes.append(run_command(search.main, words(place, *broken)))
        with open(place.runs / "broken/search/journal.log", "ab") as file:
            file.write(b'{"op_code": 4, "worker_')  # killed while it wrote
    assert codes.count(130) > 3 and codes[-1] == 0
    got = found(place, capsys, *broken)
    assert [cell["asked"] for cell in got["cells"]] == [14, 14]
    assert [values(cell) for cell in got["cells"]] == [values(cell) for cell in expected["cells"]]
    best = got["cells"][0]["suggestions"][0]
    assert best["values"]["optim.learning_rate"] == pytest.approx(0.05, rel=0.5)


def test_a_search_killed_while_it_asked_asks_what_it_would_have_asked(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    more = ("search.trials=6", "search.batch=3", "search.startup=2", "study.rules=[prenorm]")
    assert run_command(search.main, words(place, *more)) == 0
    (expected,) = found(place, capsys, *more)["cells"]
    journal = place.runs / "tiny-rate/search/journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    values_set = [at for at, line in enumerate(lines) if json.loads(line)["op_code"] == SET_PARAM]
    for at in (values_set[1], values_set[1] + 1, values_set[4]):  # without its value, and with it
        journal.write_bytes(b"".join(lines[:at]) + lines[at][:9])
        assert run_command(search.main, words(place, *more)) == 0
        (cell,) = found(place, capsys, *more)["cells"]
        assert values(cell) == values(expected)


def rounds(lines: list[bytes]) -> list[int]:
    """How many suggestions were asked before the next answer, in the order of a journal."""
    lengths, asked = [], 0
    for code in (json.loads(line)["op_code"] for line in lines):
        asked += code == CREATE_TRIAL
        if code == SET_STATE and asked:
            lengths.append(asked)
            asked = 0
    return lengths


def test_a_larger_search_killed_while_it_asked_has_the_rounds_that_it_would_have_had(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    more = ("search.batch=3", "search.sampler=random", "study.rules=[prenorm]")
    journal = place.runs / "tiny-rate/search/journal.log"
    assert run_command(search.main, words(place, *more, "search.trials=4")) == 0  # its second round is short
    first = len(journal.read_bytes().splitlines())
    assert run_command(search.main, words(place, *more, "search.trials=9")) == 0
    lines = journal.read_bytes().splitlines(keepends=True)
    assert rounds(lines) == [3, 1, 2, 3]
    (at, *_) = (at for at in range(first, len(lines)) if json.loads(lines[at])["op_code"] == SET_PARAM)
    journal.write_bytes(b"".join(lines[: at + 1]))
    assert run_command(search.main, words(place, *more, "search.trials=9")) == 0
    assert rounds(journal.read_bytes().splitlines()) == [3, 1, 2, 3]


@pytest.mark.parametrize(
    "line", ["[]", "null", '"x"', '{"op_code": 99}', '{"op_code": 2, "study_id": 0, "user_attr": 3}']
)
def test_a_line_that_is_none_of_optunas_is_one_line_of_ours(
    place: Workplace, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    more = ("search.trials=1", "study.rules=[prenorm]")
    assert run_command(search.main, words(place, *more)) == 0
    with open(place.runs / "tiny-rate/search/journal.log", "a") as file:
        file.write(line + "\n")
    for option in ([], ["--show"]):
        capsys.readouterr()
        assert run_command(search.main, [*words(place, *more), *option]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "journal.log: cannot be read" in error and "move it away" in error


def test_a_last_line_without_sense_is_not_in_the_way_of_the_next(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    more = ("search.batch=1", "study.rules=[prenorm]")
    assert run_command(search.main, words(place, *more, "search.trials=2")) == 0
    for garbage in (b"\0\0\0\n", b"half a li\n{"):
        with open(place.runs / "tiny-rate/search/journal.log", "ab") as file:
            file.write(garbage)
    assert run_command(search.main, words(place, *more, "search.trials=4")) == 0
    (cell,) = found(place, capsys, *more)["cells"]
    assert [one["state"] for one in cell["suggestions"]] == ["finished"] * 4


def test_a_key_of_another_choice_of_its_group_ends_no_search(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    both = "optim: {choices: [adamw, muon]}\n  optim.ns_steps: {low: 4, high: 5}"
    write(place.configs / "search/both.yaml", f"name: both\nsampler: random\nspace:\n  {both}\n")
    more = ("search=both", "study.rules=[prenorm]", "search.trials=8")
    assert run_command(search.main, words(place, *more)) == 1
    assert run_command(search.main, words(place, *more)) == 1  # some failed, and that is still so
    (cell,) = found(place, capsys, *more)["cells"]
    assert cell["asked"] == 8
    for one in cell["suggestions"]:
        assert one["state"] == ("finished" if one["values"]["optim"] == "muon" else "failed")


@pytest.mark.slow
def test_what_diverged_and_what_failed(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(rate: float) -> TrialState:
        if rate > 0.2:
            return TrialState("diverged", "training loss is nan at step 3")
        return TrialState("failed", "RuntimeError: no such luck") if rate < 0.003 else bowl(rate)

    pretend(monkeypatch, place, says)
    more = ("search.trials=20", "study.rules=[prenorm]", "search.sampler=random", "search.batch=20")
    assert run_command(search.main, words(place, *more)) == 1
    (cell,) = found(place, capsys, *more)["cells"]
    for one in cell["suggestions"]:
        state = says(one["values"]["optim.learning_rate"])
        assert one["state"] == state.state
        assert one["loss_nats"] == (state.loss_nats and pytest.approx(state.loss_nats))
        assert one["reason"] == state.reason
    assert {one["state"] for one in cell["suggestions"]} == {"finished", "diverged", "failed"}
    # The Parzen estimator goes on with an infinite loss among its points.
    assert run_command(search.main, words(place, *more, "search.sampler=tpe", "search.trials=30")) == 1


def test_unfinished_trials_are_left_for_the_next_call(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, lambda rate: TrialState("preempted"))
    monkeypatch.setattr(search, "_train", lambda *_: None)
    more = ("search.trials=4", "search.batch=2", "study.rules=[prenorm]")
    assert run_command(search.main, words(place, *more)) == 1
    assert "2 suggestions have no result yet" in capsys.readouterr().out
    pretend(monkeypatch, place, bowl)
    assert run_command(search.main, words(place, *more)) == 0
    (cell,) = found(place, capsys, *more)["cells"]
    assert [one["state"] for one in cell["suggestions"]] == ["finished"] * 4


def test_other_keys_and_values_that_do_not_go_together(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    more = ("search=more", "study.rules=[prenorm]", "schedule.warmup_fraction=0.9")
    assert run_command(search.main, words(place, *more)) == 1
    assert "schedule.decay_fraction" in capsys.readouterr().err
    (cell,) = found(place, capsys, *more)["cells"]
    assert cell["asked"] == 12
    for one in cell["suggestions"]:
        assert one["values"]["model.batch_size"] in (1, 2)
        assert (one["state"] == "failed") == (one["values"]["schedule"] == "wsd")
        assert len(one["trials"]) == (one["state"] == "finished")


@pytest.mark.slow
def test_best_rates_become_a_file_unless_they_are_at_an_edge(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    more = ("search.trials=10", "search.sampler=random")
    target = place.configs / "rates/found.yaml"
    assert run_command(search.main, [*words(place, *more), "--write-rates=found"]) == 0
    best = found(place, capsys, *more)["cells"][0]["suggestions"][0]
    written = yaml.safe_load(target.read_text())
    assert written["rates"] == {"tiny_a": float(f"{best['values']['optim.learning_rate']:.4g}")}
    assert written["source"]["optima"][0]["trials"] == best["trials"]
    low, high = written["source"]["optima"][0]["between"]
    assert low < written["rates"]["tiny_a"] < high
    study = place.study("study.sizes=[tiny_a]", "rates=found")
    assert {p.trial.config.optim.learning_rate for p in study.trials} == {written["rates"]["tiny_a"]}
    pretend(monkeypatch, place, lambda rate: TrialState("finished", loss_nats=1 / rate))
    edge = ("search.trials=30", "search.sampler=random", "study.name=edge")
    assert run_command(search.main, [*words(place, *edge), "--write-rates=edge"]) == 2
    assert "at the edge of the searched 0.001 to 1: widen it" in capsys.readouterr().err
    assert not (place.configs / "rates/edge.yaml").exists()


def test_a_journal_belongs_to_its_settings(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    assert run_command(search.main, words(place, "search.trials=1")) == 0
    assert run_command(search.main, words(place, "search.trials=1", "budget.tokens=256")) == 2
    error = capsys.readouterr().err
    assert "made with other settings of its trials; it was started with " in error
    assert error.endswith(
        "'study.sizes=[tiny_a]' budget.tokens=128 budget.evaluations=1 search.trials=1: "
        "give these, or search.name=... another name\n"
    )
    write(place.configs / "search/rate.yaml", SPACE.replace("1.0,", "2.0,"))
    assert run_command(search.main, words(place, "search.trials=1")) == 2
    assert "made with another space" in capsys.readouterr().err
    write(place.configs / "search/rate.yaml", SPACE)
    with TrialLock(place.runs / "tiny-rate/search"):
        assert run_command(search.main, words(place, "search.trials=2")) == 2
        assert f"process {os.getpid()} searches here already" in capsys.readouterr().err
        assert run_command(search.main, [*words(place), "--show"]) == 0


def test_who_looks_need_not_repeat_how_it_was_started(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, bowl)
    assert run_command(search.main, words(place, "search.trials=12", "search.sampler=random")) == 0
    where = ["study=tiny", "search=rate", f"runs_dir={place.runs}", "--config-dir", str(place.configs)]
    capsys.readouterr()
    assert run_command(search.main, [*where, "--show"]) == 0
    shown = capsys.readouterr().out
    assert "tiny_a prenorm: 12 of 12 suggestions" in shown and "search rate by random" in shown
    assert "the best 10 of each size and rule are shown; --json has the other 4\n" in shown
    assert run_command(search.main, [*where, "--show", "--write-rates=looked"]) == 0
    assert list(yaml.safe_load((place.configs / "rates/looked.yaml").read_text())["rates"]) == ["tiny_a"]
    # A copy is looked at where it is, whatever the original has since become.
    shutil.copytree(place.runs, place.runs.parent / "copy")
    assert run_command(search.main, words(place, "search.trials=13", "search.sampler=random")) == 0
    capsys.readouterr()
    moved = [word.replace(str(place.runs), str(place.runs.parent / "copy")) for word in where]
    assert run_command(search.main, [*moved, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["asked"] == 12
    # What is given differently is another search.
    assert run_command(search.main, [*where, "--show", "budget.tokens=256"]) == 2
    assert "it was started with " in capsys.readouterr().err
    kept = place.runs / "tiny-rate/search/words.json"
    for torn in ('{"overrides": [', '{"overrides": ["a"]}', '{"overrides": 3}', "[]"):
        kept.write_text(torn)
        assert run_command(search.main, [*where, "--show"]) == 2
        error = capsys.readouterr().err
        assert str(kept) in error and error.count("\n") == 1 and "remove it" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["search=rat"], "search=rat: did you mean rate?"),
        (["search.sampler=grid"], "search.sampler=grid: one of random, tpe, gp"),
        (["search.trials=0"], "search.trials=0: must be positive"),
        (["search.tials=3"], "search.tials=3: unknown key"),
        (["study.axes.optim.beta2=[0.9,0.95]"], "a search chooses values itself"),
        (["optim.learning_rate=0.1"], "optim.learning_rate=0.1: is set, and search=rate chooses it"),
        (["--write-rates=x", "search=more"], "the search's space is optim.beta2, model.batch_size, schedule"),
        (["--show"], "there is no search yet"),
        (["search=bad_key"], "search.space=data.path: a search can choose optim.*, schedule.*"),
        (["search=bad_range"], "a range needs 0 < low < high"),
        (["search=bad_text"], "low and high must be numbers"),
        (["search=bad_kind"], "write {low: A, high: B, log: true} or {choices: [A, B]}"),
        (["search=bad_name"], "search.space.optim.beta3=0.9: unknown key; did you mean optim.beta"),
        (["search=bad_end"], "search.space.optim.learning_rate=-0.5: must be positive"),
        (["search=bad_choice"], "search.space.optim.beta2=abc: must be a number"),
        (["search=bad_group"], "search.space.schedule=linear: one of cosine, wsd"),
        (["search=bad_other"], "search.space.optim.ns_steps=4: unknown key; another choice of optim has it"),
        (["search=1.5"], "search=1.5: reads as a number"),
        (["search.space={}"], "search.space={}: write the space into DIR/search/NAME.yaml"),
    ],
)
def test_mistakes_are_one_line(
    place: Workplace, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, space in {
        "bad_key": "data.path: {choices: [a, b]}",
        "bad_range": "optim.learning_rate: {low: 0, high: 1, log: true}",
        "bad_text": "optim.learning_rate: {low: a, high: 1}",
        "bad_kind": "optim.learning_rate: [1, 2]",
        "bad_name": "optim.beta3: {low: 0.9, high: 0.95}",
        "bad_end": "optim.learning_rate: {low: -0.5, high: 1}",
        "bad_choice": "optim.beta2: {choices: [0.9, abc]}",
        "bad_group": "schedule: {choices: [cosine, linear]}",
        "bad_other": "optim.ns_steps: {low: 4, high: 5}",
        "1.5": "optim.beta2: {low: 0.9, high: 0.95}",
    }.items():
        write(place.configs / f"search/{name}.yaml", f"name: {name}\nspace:\n  {space}\n")
    assert run_command(search.main, words(place, *more)) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and "Traceback" not in error
    assert not (place.runs / "tiny-rate").exists()


@pytest.mark.slow
def test_a_gaussian_process_finds_the_bottom_beside_what_diverged(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, place, lambda rate: TrialState("diverged", "nan") if rate > 0.2 else bowl(rate))
    more = ("search.sampler=gp", "search.trials=16", "study.rules=[prenorm]", "search.batch=2")
    assert run_command(search.main, words(place, *more)) == 0
    (cell,) = found(place, capsys, *more)["cells"]
    assert cell["suggestions"][0]["values"]["optim.learning_rate"] == pytest.approx(0.05, rel=0.2)
    assert len({one["values"]["optim.learning_rate"] for one in cell["suggestions"]}) == 16
