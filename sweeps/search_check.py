"""Whether the values of a search's space can be used at all: asked before a journal holds any of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from attnres.compose import Composed, compose_trial, group_options
from attnres.errors import ConfigError
from attnres.trial import resolve
from sweeps.choices import Axis, check_name
from sweeps.search_config import Choices, Range
from sweeps.study import PlannedTrial


def check_space(space: Mapping[str, Range | Choices], planned: PlannedTrial, config_dir: str | None) -> None:
    """ConfigError for a key that no trial has, or a choice or an end of a range that it refuses.

    `planned` is a trial of the study: what a key of a space takes hangs neither on size nor on rule. Values
    that only do not go together are no mistake of the space: a suggestion of them is told as failed. So is a
    key of one choice of a group beside another choice.
    """
    groups = group_options(config_dir)
    chosen = {key: _ends(values) for key, values in space.items() if key in groups}
    for key, choices in chosen.items():
        for value in choices:
            check_name(f"search.space.{key}", value, groups[key])
    together = [
        [Axis(key, ()).override(value, groups) for key, value in zip(chosen, combination, strict=True)]
        for combination in itertools.product(*chosen.values())
    ]
    composed: Composed = {}
    for key, values in space.items():
        if key in groups:
            continue
        for value in _ends(values):
            word = Axis(key, ()).override(value, groups)
            why = [_refused(key, planned, [*words, word], config_dir, composed) for words in together]
            if all(why):
                raise ConfigError(f"search.space.{key}", value, str(why[0]))


def _ends(values: Range | Choices) -> tuple[Any, ...]:
    return values.values if isinstance(values, Choices) else (values.low, values.high)


def _refused(
    key: str, planned: PlannedTrial, words: list[str], config_dir: str | None, composed: Composed
) -> str | None:
    """Why a trial refuses this very key, or None."""
    try:
        resolve(compose_trial((*planned.overrides, *words), config_dir, composed), planned.corpus)
    except ConfigError as error:
        return error.why if error.field == key else None
    return None
