"""`python -m sweeps.search study=NAME search=NAME`: random or Bayesian search of hyperparameters, by Optuna.

Every suggestion is a trial like any other: its id is the hash of what it resolves to, the launcher runs it on
the chosen executor, and what is told to Optuna is read from its record.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnres.cli import help_text, reject_options, run_command, take_flag, take_option, wants_help
from attnres.compose import Composed, compose_trial, group_options
from attnres.errors import ConfigError, UserError
from attnres.lock import TrialBusy, TrialLock
from attnres.rates_file import take_choice
from attnres.trial import resolve
from sweeps.capacity import capacity
from sweeps.choices import Axis
from sweeps.config import load_sweep
from sweeps.executors import open_executor
from sweeps.interrupts import Interrupts
from sweeps.launch import heeded, launch
from sweeps.live import Watch, open_screen
from sweeps.plan import GROUPS, say
from sweeps.search_check import check_space
from sweeps.search_config import SearchConfig, load_search
from sweeps.search_journal import Journal, Suggestion, Told, open_journals
from sweeps.search_output import print_search, rates_of_search, search_json, write_search
from sweeps.search_words import completed, recall, remember
from sweeps.state import read_state
from sweeps.study import PlannedTrial, Study, load_study, write_study
from sweeps.study_eta import StudyEta

FOLDER = "search"  # of the journal, in the folder of the search's trials
CLUSTER_BATCH = 8

USAGE = """
usage: python -m sweeps.search study=NAME search=NAME [key=value ...] [options]

Suggests values of a trial's keys, trains them, and learns from the losses: a search of its own for each size
and rule of the study, over all its seeds. Stop it at any moment: the same command goes on, asks nothing
twice and trains nothing twice. A larger search.trials goes on from there. Records are in
runs_dir/STUDY-SEARCH/.

  search.KEY=VALUE  changes the search: search.trials=50 search.sampler=random
  study.KEY=VALUE   changes the study: study.sizes=[cpu_50k] study.rules=[prenorm] study.seeds=[0,1]
  launch.workers=N, executor=NAME, anything else: as for sweeps.launch
  --json            what has been found so far, for programs; trains nothing
  --show            the same as a table. Both need study, search and runs_dir alone: the search remembers
                    what else it was started with
  --retry-failed    trains again what failed of its own (an exception), where it has not been told yet
  --write-rates NAME --config-dir DIR, --shared, --per-rule: the best learning rates as a file that studies
                    use, as for analysis.report; refused at an edge of the searched range
  --config-dir DIR  your own YAML files, DIR/search/NAME.yaml among them

Exit code 0: all suggestions have been tried; 1: some failed or are left; 2: a mistake; 130 or 143: stopped.
"""
EXAMPLES = (
    'python -m sweeps.search study=smoke search=learning_rate "study.sizes=[cpu_50k]"',
    "python -m sweeps.search study=smoke search=optimizer search.sampler=random search.trials=100",
    "python -m sweeps.search study=smoke search=learning_rate --write-rates mine --config-dir my_configs",
)


class Search:
    """A study, what is searched in it, and the journals of its cells."""

    def __init__(self, study: Study, config: SearchConfig, config_dir: str | None) -> None:
        self.study, self.config, self.config_dir = study, config, config_dir
        self.folder = study.folder / FOLDER
        self.axes = [Axis(key, ()) for key in config.space]
        self.cells: dict[str, list[PlannedTrial]] = {}
        for planned in study.trials:
            self.cells.setdefault(planned.cell, []).append(planned)
        self._groups = group_options(config_dir)
        self._composed: Composed = {}
        self._planned: dict[tuple[str, str], list[PlannedTrial]] = {}
        _check_not_set(study, config)

    def open(self, alone: bool) -> dict[str, Journal]:
        """`alone`: this process has the lock."""
        ids = {cell: [planned.trial.id for planned in members] for cell, members in self.cells.items()}
        return open_journals(self.folder, self.config, ids, alone)

    def trials_of(self, cell: str, one: Suggestion) -> list[PlannedTrial]:
        """The trials of a suggestion, one for each seed. ConfigError for values that do not go together."""
        key = cell, json.dumps(one.values)
        if key not in self._planned:
            words = [axis.override(one.values[axis.key], self._groups) for axis in self.axes]
            planned = []
            for base in self.cells[cell]:
                overrides = (*base.overrides, *words)
                config = compose_trial(overrides, self.config_dir, self._composed)
                trial = resolve(dataclasses.replace(config, seed=base.seed), base.corpus)
                planned.append(
                    dataclasses.replace(base, trial=trial, axes=dict(one.values), overrides=overrides)
                )
            self._planned[key] = planned
        return self._planned[key]

    def with_trials(self, journals: Mapping[str, Journal]) -> Study:
        """The study whose trials are all suggestions so far."""
        trials: dict[str, PlannedTrial] = {}
        for cell, journal in journals.items():
            for one in journal.suggestions():
                if one.told != "failed":
                    trials |= {planned.trial.id: planned for planned in self.trials_of(cell, one)}
        one_axis = list(self.config.space) == ["optim.learning_rate"]
        config = dataclasses.replace(self.study.config.study, report="rates" if one_axis else "rows")
        sweep = dataclasses.replace(self.study.config, study=config)
        return dataclasses.replace(self.study, config=sweep, trials=tuple(trials.values()))

    @property
    def batch(self) -> int:
        """Suggestions of a cell at once."""
        if self.config.batch is not None:
            return self.config.batch
        at_once = capacity(self.study)
        return math.ceil(at_once.workers / len(self.study.trials)) if at_once.here else CLUSTER_BATCH


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, ("search", *GROUPS), EXAMPLES))
        return 0
    config_dir = take_option(list(argv), "--config-dir")
    choice = take_choice(argv, needs_choice=False)
    as_json, show = take_flag(argv, "--json"), take_flag(argv, "--show")
    retry_failed = take_flag(argv, "--retry-failed")
    reject_options(argv)
    if choice is not None and config_dir is not None and not Path(config_dir).exists():
        config_dir = None  # it comes into being with the file of rates
    search = open_search(argv, config_dir, looks=as_json or show)
    if choice is not None and list(search.config.space) != ["optim.learning_rate"]:
        keys = ", ".join(search.config.space)
        why = f"a file of rates holds learning rates alone, and the search's space is {keys}"
        raise ConfigError("--write-rates", choice.target.name, why)
    code = 0
    if as_json or show:
        journals = search.open(alone=False)
    else:
        check_space(search.config.space, search.study.trials[0], config_dir)
        journals, code = run(search, retry_failed, argv)
    found = search_json(search.study, search.config, journals, search.trials_of)
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print_search(found)
    if choice is not None and code < 128:
        lines, whole = rates_of_search(found, choice, search.config, search.study.config.study.baseline)
        print("\n".join(lines), file=sys.stderr if as_json else sys.stdout)
        code = code or (0 if whole else 1)
    return code


def open_search(argv: Sequence[str], config_dir: str | None, looks: bool = False) -> Search:
    """Resolve both halves of the command line. Who only `looks` need not repeat its settings."""
    config, theirs = _halves(argv, config_dir)
    if looks:
        sweep = load_sweep(theirs, config_dir)
        folder = Path(sweep.runs_dir) / sweep.study.name / FOLDER
        if not folder.is_dir():
            why = "there is no search yet; the same command without --show or --json starts it"
            raise UserError(f"{folder}: {why}")
        config, theirs = _halves(completed(argv, recall(folder)), config_dir)
    return Search(load_study(theirs, config_dir, say), config, config_dir)


def _halves(argv: Sequence[str], config_dir: str | None) -> tuple[SearchConfig, list[str]]:
    """The search, and the words of its study, which has a name of its own."""
    ours = [word for word in argv if word.partition("=")[0].partition(".")[0] == "search"]
    config = load_search(ours, config_dir)
    theirs = [word for word in argv if word not in ours]
    given = dict(word.partition("=")[::2] for word in theirs)
    if "study" in given and "study.name" not in given:
        theirs.append(f"study.name={given['study']}-{config.name}")
    return config, theirs


def run(
    search: Search, retry_failed: bool = False, words: Sequence[str] = ()
) -> tuple[dict[str, Journal], int]:
    """Rounds of ask, train, tell until every cell has its suggestions; the exit code.

    `words` are the overrides that this search was started with.
    """
    try:
        with TrialLock(search.folder):
            journals = search.open(alone=True)
            remember(search.folder, words)
            code = _rounds(search, journals, retry_failed)
            write_search(search.folder, search_json(search.study, search.config, journals, search.trials_of))
            return journals, code
    except TrialBusy as error:
        raise UserError(
            f"{search.folder}: process {error.pid or '(starting)'} searches here already"
        ) from None


def _rounds(search: Search, journals: Mapping[str, Journal], retry_failed: bool) -> int:
    failed = False
    while True:
        asked = {cell: _ask(search, journal) for cell, journal in journals.items()}
        trials, wrong = _round_trials(search, journals, asked)
        failed = failed or wrong
        if not any(asked.values()):
            before = any(
                one.told == "failed" for journal in journals.values() for one in journal.suggestions()
            )
            return 1 if failed or before else 0
        if trials:
            stopped = _train(search, journals, trials, retry_failed)
            told = [
                _tell(journals[cell], one, search.trials_of(cell, one))
                for cell, one in _pairs(asked, journals)
            ]
            failed = failed or "failed" in told
            if stopped is not None:
                print("stopped; the same command goes on")
                return 128 + stopped
            if "running" in told:
                print(f"{told.count('running')} suggestions have no result yet; the same command goes on")
                return 1
            if told and all(word == "failed" for word in told):
                print("every trial of this round failed; the search ends here")
                return 1


def _pairs(
    asked: Mapping[str, Sequence[Suggestion]], journals: Mapping[str, Journal]
) -> list[tuple[str, Suggestion]]:
    """Suggestions of this round that still wait for an answer."""
    waiting = {
        (cell, one.number) for cell in asked for one in journals[cell].suggestions() if one.told == "running"
    }
    return [(cell, one) for cell, ones in asked.items() for one in ones if (cell, one.number) in waiting]


def _ask(search: Search, journal: Journal) -> list[Suggestion]:
    """What an earlier call asked and did not come to tell, and the rest of its round; else the next ones.

    Rounds end at multiples of the batch, also after one that was cut short, as fewer trials were wanted.
    """
    known = journal.suggestions()
    left, batch = max(0, search.config.trials - len(known)), search.batch
    if waiting := [one for one in known if one.told == "running"]:
        return [*waiting, *journal.ask(min(-len(known) % batch, left))]
    return journal.ask(min(batch - len(known) % batch, left))


def _round_trials(
    search: Search, journals: Mapping[str, Journal], asked: Mapping[str, Sequence[Suggestion]]
) -> tuple[list[PlannedTrial], bool]:
    """Each trial once, and whether there were values that do not go together: those are told as failed."""
    trials: dict[str, PlannedTrial] = {}
    wrong = False
    for cell, ones in asked.items():
        for one in ones:
            try:
                trials |= {planned.trial.id: planned for planned in search.trials_of(cell, one)}
            except ConfigError as error:
                wrong = True
                say(f"{cell}: {error}")
                journals[cell].tell(one.number, None, "failed", str(error))
    return list(trials.values()), wrong


def _train(
    search: Search, journals: Mapping[str, Journal], trials: Sequence[PlannedTrial], retry_failed: bool
) -> int | None:
    """Launch what has no record yet; the number of the signal that ended it, if one did."""
    study = search.with_trials(journals)
    if all(read_state(planned.trial.folder).ended for planned in trials):
        write_study(study)
        return None
    executor = open_executor(study)
    eta = StudyEta({}, study.config.launch.workers if executor.queues else study.workers)
    with Interrupts(heeded(executor)) as interrupts:
        watch = Watch(open_screen(study.config.launch.report_seconds), eta)
        try:
            launch(study, executor, watch, interrupts, trials, retry_failed)
        finally:
            watch.close()
        return interrupts.first


def _tell(journal: Journal, one: Suggestion, trials: Sequence[PlannedTrial]) -> Told:
    """Tell what the records say: the mean loss over seeds, a divergence of any, a failure of any."""
    states = [read_state(planned.trial.folder) for planned in trials]
    words = {state.state for state in states}
    losses = [
        state.loss_nats for state in states if state.state == "finished" and state.loss_nats is not None
    ]
    reason = next((state.reason for state in states if state.state in ("diverged", "failed")), None)
    told: Told = "running"
    if words & {"diverged"}:
        told = "diverged"
    elif words & {"failed"}:
        told = "failed"
    elif len(losses) == len(states):
        told = "finished"
    if told != "running":
        loss = sum(losses) / len(losses) if told == "finished" else None
        journal.tell(one.number, loss, told, reason if told != "finished" else None)
    return told


def _check_not_set(study: Study, config: SearchConfig) -> None:
    """A key is searched, or set, or an axis: one of these."""
    if study.config.study.axes:
        axes = [axis.key for axis in study.config.study.axes]
        raise ConfigError("study.axes", axes, "a search chooses values itself: it needs a study without axes")
    for planned in study.trials:
        for word in planned.overrides:
            if (key := word.partition("=")[0]) in config.space:
                raise ConfigError(key, word.partition("=")[2], f"is set, and search={config.name} chooses it")


if __name__ == "__main__":
    sys.exit(run_command(main))
