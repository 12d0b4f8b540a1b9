"""Optuna's side of a search, by ask and tell on a journal file: one Optuna study for each size and rule.

Optuna is imported here alone, when a search is opened. A suggestion depends on what has been told and on its
number only, so a search that was killed goes on as it would have gone on.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnres.errors import ConfigError, UserError
from sweeps.search_config import Choices, Range, SearchConfig
from sweeps.search_words import recall, settings

JOURNAL_FILE = "journal.log"

Told = Literal["running", "finished", "diverged", "failed"]


@dataclass(frozen=True)
class Suggestion:
    """Values that were suggested, and what has been told of them."""

    number: int
    values: Mapping[str, Any]
    told: Told
    loss_nats: float | None  # mean over seeds, of a finished one
    reason: str | None


class Journal:
    """The suggestions of one size and rule."""

    def __init__(self, study: Any, search: SearchConfig) -> None:
        self._study, self._search = study, search
        self._distributions = {key: _distribution(values) for key, values in search.space.items()}

    def suggestions(self) -> list[Suggestion]:
        """All whose values are known. One that was cut off while it was written is none: nothing ran."""
        found = [self._suggestion(trial) for trial in self._study.get_trials(deepcopy=False)]
        return [one for one in found if one is not None]

    def ask(self, count: int) -> list[Suggestion]:
        self._end_what_was_cut_off()
        asked = []
        for _ in range(count):
            number = len(self.suggestions())  # one that was cut off does not count: it is suggested again
            self._study.sampler = _sampler(self._search, number)
            with warnings.catch_warnings():
                # A Gaussian process takes the worst finite loss for an infinite one, as it should.
                warnings.filterwarnings("ignore", message="Clip non-finite values")
                trial = self._study.ask(self._distributions)
            asked.append(Suggestion(trial.number, dict(trial.params), "running", None, None))
        return asked

    def tell(self, number: int, loss_nats: float | None, told: Told, reason: str | None = None) -> None:
        """A diverged trial is told as an infinite loss: samplers then keep away, which they do not from a
        failed one."""
        import optuna

        trial_id = self._study.get_trials(deepcopy=False)[number]._trial_id
        self._study._storage.set_trial_user_attr(trial_id, "told", told)
        if reason:
            self._study._storage.set_trial_user_attr(trial_id, "reason", reason)
        if told == "failed":
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, math.inf if told == "diverged" else loss_nats)

    def _end_what_was_cut_off(self) -> None:
        """Samplers would count a suggestion without values as one that runs, and suggest something else."""
        import optuna

        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished() and self._suggestion(trial) is None:
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def _suggestion(self, trial: Any) -> Suggestion | None:
        if set(trial.params) != set(self._distributions):
            return None
        if not trial.state.is_finished():
            return Suggestion(trial.number, dict(trial.params), "running", None, None)
        told = trial.user_attrs.get("told", "failed")
        loss = trial.value if told == "finished" else None
        return Suggestion(trial.number, dict(trial.params), told, loss, trial.user_attrs.get("reason"))


class _Held:
    """Whoever searches holds the lock of the folder; Optuna's own would outlive a killed process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_journals(
    folder: Path, search: SearchConfig, cells: Mapping[str, Sequence[str]], alone: bool
) -> dict[str, Journal]:
    """The journal of each cell, new or with what earlier calls asked and told.

    `cells` has the ids of each cell's trials as the study has them: what was told belongs to these settings.
    `alone`: this process has the lock, and may mend the file.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UserError("sweeps.search: needs pip install -e '.[search]'")
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JOURNAL_FILE
    if alone:
        _drop_torn_line(path)
    lock: Any = _Held()
    try:
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # Whatever Optuna trips over in a line that is none of its own: it checks none of them.
        why = f"cannot be read ({type(error).__name__}: {error}); move it away to search anew"
        raise UserError(f"{path}: {why}; what is trained stays") from None
    space = {key: vars(values) for key, values in search.space.items()}
    there, journals = optuna.get_all_study_names(storage), {}
    for cell, ids in cells.items():
        if cell in there:
            study = optuna.load_study(storage=storage, study_name=cell)
        elif alone:
            study = optuna.create_study(storage=storage, study_name=cell, direction="minimize")
        else:
            raise UserError(f"{path}: has no suggestions for {cell} yet")
        made_with = json.loads(json.dumps({"space": space, "trials": sorted(ids)}))
        before = study.user_attrs.get("made_with")
        if before is None:
            study.set_user_attr("made_with", made_with)
        elif before != made_with:
            same = isinstance(before, dict) and before.get("trials") == made_with["trials"]
            what = "another space" if same else "other settings of its trials"
            advice = "give search.name=... another name"
            if not same and (words := settings(recall(folder))):
                advice = f"it was started with {words}: give these, or {advice.removeprefix('give ')}"
            why = f"{path} has suggestions for {cell} made with {what}; {advice}"
            raise ConfigError("search.name", search.name, why)
        journals[cell] = Journal(study, search)
    return journals


def _drop_torn_line(path: Path) -> None:
    """A process that was killed while it wrote leaves the start of a line; the next would be glued to it.

    So is a last line that says nothing: Optuna passes over it only while none follows.
    """
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        while whole and not _is_json(whole[whole.rfind(b"\n", 0, -1) + 1 :]):
            whole = whole[: whole.rfind(b"\n", 0, -1) + 1]
        if len(whole) < len(text):
            file.truncate(len(whole))
            file.flush()
            os.fsync(file.fileno())


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _distribution(values: Range | Choices) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, Choices):
        return CategoricalDistribution(values.values)
    if values.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(float(values.low), float(values.high), log=values.log)


def _sampler(search: SearchConfig, number: int) -> Any:
    """Seeded by the number of the suggestion: a sampler has no memory that a killed search could lose."""
    from optuna.samplers import GPSampler, RandomSampler, TPESampler

    seed = search.sampler_seed * 100_003 + number
    if search.sampler == "random":
        return RandomSampler(seed=seed)
    if search.sampler == "gp":
        return GPSampler(seed=seed, n_startup_trials=search.startup)
    return TPESampler(seed=seed, n_startup_trials=search.startup)
