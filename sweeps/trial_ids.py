"""Naming one trial of a study: its id, an unambiguous beginning of it, or its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnres.errors import UserError

Named = tuple[str, str]  # id, name
_SHOWN = 4


def choose(trials: Sequence[Named], words: Iterable[str], study: str) -> list[str]:
    """The ids that the words mean, each once, in the study's order. UserError for any other word."""
    chosen = {_one(trials, word, study) for word in words}
    return [trial for trial, _ in trials if trial in chosen]


def _one(trials: Sequence[Named], word: str, study: str) -> str:
    if not word.strip():
        raise UserError(f"{word!r}: is empty; name a trial by its id or name, as sweeps.status lists them")
    exact = [trial for trial, name in trials if word in (trial, name)]
    found = exact or [trial for trial, _ in trials if trial.startswith(word)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{word}: no trial of study {study} has this id or name; sweeps.status lists them")
    names = [f"{trial} ({name})" for trial, name in trials if trial in found]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise UserError(f"{word}: begins the ids of {', '.join(names[:_SHOWN])}{more}; write more of it")
