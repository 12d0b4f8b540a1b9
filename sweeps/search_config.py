"""What a search is told: its sampler, how many suggestions, and the space that they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnres.compose import compose_mapping, group_options
from attnres.config import NAME_PATTERN, build
from attnres.errors import ConfigError, UserError

# Suggestions are compared by their loss: they must keep the data, the budget, the size and the rule.
_TOPS = ("optim", "schedule")
_KEYS = ("model.batch_size",)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; whole ones if both are whole, unless `log` says that ratios count."""

    low: float
    high: float
    log: bool

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            needs = "0 < low < high" if self.log else "low < high"
            raise ConfigError("search.space", [self.low, self.high], f"a range needs {needs}")

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Choices:
    """One of these values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class _Settings:
    """What a search is told besides its space, whose values are not all of one kind."""

    name: str
    sampler: Literal["random", "tpe", "gp"]
    trials: int
    startup: int
    batch: int | None
    sampler_seed: int

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise ConfigError("search.name", self.name, "use 1 to 64 letters, digits, . _ -")
        for field in ("trials", "startup", "batch"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"search.{field}", value, "must be positive")
        if self.sampler_seed < 0:
            raise ConfigError("search.sampler_seed", self.sampler_seed, "must not be negative")


@dataclass(frozen=True)
class SearchConfig(_Settings):
    """A search of the config group `search`."""

    space: Mapping[str, Range | Choices]


def load_search(words: Sequence[str], config_dir: str | None) -> SearchConfig:
    """`search=NAME` and `search.KEY=VALUE` -> SearchConfig; ConfigError for whatever is wrong with them."""
    names = group_options(config_dir).get("search", [])
    if not any(word.startswith("search=") for word in words):
        raise UserError(f"search=: choose a search: {', '.join(names)}")
    for word in words:
        if word.startswith("search.space"):  # Hydra would merge it into the file's, key by key
            key, _, value = word.partition("=")
            raise ConfigError(
                key, value, "write the space into DIR/search/NAME.yaml and add --config-dir DIR"
            )
    mapping = compose_mapping("search", words, config_dir)["search"]
    if not isinstance(mapping, Mapping):
        raise ConfigError("search", mapping, "must be a group of keys")
    space = _space(mapping.get("space"))
    rest = {key: value for key, value in mapping.items() if key != "space"}
    return SearchConfig(**vars(build(_Settings, rest, "search")), space=space)


def _space(space: Any) -> dict[str, Range | Choices]:
    if not isinstance(space, Mapping) or not space:
        raise ConfigError("search.space", space, "must map trial keys to {low, high, log} or {choices}")
    parsed = {}
    for key, value in space.items():
        key = str(key)
        if key.partition(".")[0] not in _TOPS and key not in _KEYS:
            why = f"a search can choose {', '.join(f'{top}.*' for top in _TOPS)} and {', '.join(_KEYS)}"
            raise ConfigError("search.space", key, why)
        parsed[key] = _values(f"search.space.{key}", value)
    return parsed


def _values(field: str, value: Any) -> Range | Choices:
    if isinstance(value, Mapping) and set(value) == {"choices"}:
        choices = value["choices"]
        if not isinstance(choices, list) or len(choices) < 2:
            raise ConfigError(field, choices, "choices must be a list of two values or more")
        if any(not isinstance(one, (str, int, float, bool, type(None))) for one in choices):
            raise ConfigError(field, choices, "choices must be plain values")
        if len(set(map(repr, choices))) < len(choices):
            raise ConfigError(field, choices, "a choice is given twice")
        return Choices(tuple(choices))
    if isinstance(value, Mapping) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        low, high, log = value["low"], value["high"], value.get("log", False)
        numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in (low, high))
        if not numbers or not isinstance(log, bool) or not math.isfinite(low) or not math.isfinite(high):
            raise ConfigError(field, dict(value), "low and high must be numbers, log true or false")
        return Range(low, high, log)
    raise ConfigError(field, value, "write {low: A, high: B, log: true} or {choices: [A, B]}")
