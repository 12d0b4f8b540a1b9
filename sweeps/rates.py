"""Learning rates of a study's sizes and rules, from a file of the config group `rates`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.errors import ConfigError
from sweeps.choices import override_value
from sweeps.table import number

LEARNING_RATE = "optim.learning_rate"
# What differs between rules where each has its own rate (Muon's follows unless it is set).
FOLLOWING = (LEARNING_RATE, "optim.muon_learning_rate")
MOST_TOKENS = 10**18  # a file by hand may have any number
SAME_BUDGET = 1.1  # times the tokens; a best rate hardly changes within that
KINDS = ("none", "shared", "per_rule")


@dataclass(frozen=True)
class RatesConfig:
    """What `rates=NAME` says. With kind "none" sizes keep the rates of their model files."""

    name: str
    kind: str
    rates: Mapping[str, float | Mapping[str, float]]  # size -> rate, or size -> label of a rule -> rate
    refused: tuple[Mapping[str, Any], ...]
    source: Mapping[str, Any]

    def overrides(self, size: str, rule: str) -> tuple[str, ...]:
        """The override of a trial of this size and rule. ConfigError where the file has no rate for it."""
        if self.kind == "none":
            return ()
        found = self.rates.get(size)
        if isinstance(found, Mapping):
            found = found.get(rule)
        if found is None:
            of = size if self.kind == "shared" else f"{size} {rule}"
            raise ConfigError("rates", self.name, f"has no rate for {of}: {self._why(size, rule)}")
        return (f"{LEARNING_RATE}={override_value(float(found))}",)

    def _why(self, size: str, rule: str) -> str:
        for one in self.refused:
            if one.get("size") == size and (self.kind == "shared" or one.get("rule") == rule):
                return f"it was refused: {one.get('why')}"
        has = self.rates.get(size) if self.kind == "per_rule" and size in self.rates else self.rates
        return f"it has {', '.join(map(str, has))}" if isinstance(has, Mapping) and has else "it has none"

    def other_budget(self, size: str, rule: str, tokens: int) -> str | None:
        """Words where the rate of this size and rule was found at another number of training tokens."""
        optima = self.source.get("optima")
        for one in optima if isinstance(optima, list) else []:
            if not isinstance(one, Mapping) or one.get("size") != size:
                continue
            found = one.get("tokens")
            if self.kind == "per_rule" and one.get("rule") != rule:
                continue
            if (
                type(found) is int
                and 0 < found < MOST_TOKENS
                and not 1 / SAME_BUDGET <= tokens / found <= SAME_BUDGET
            ):
                return f"found at {number(found)} tokens, and these trials have {number(tokens)}"
        return None

    def described(self, trials: Sequence[tuple[str, str, int]]) -> dict[str, Any] | None:
        """For study.json; `trials` are sizes, rules and training tokens."""
        if self.kind == "none":
            return None
        other: dict[str, str] = {}
        for size, rule, tokens in trials:
            if why := self.other_budget(size, rule, tokens):
                other.setdefault(size, why)
        about = {"name": self.name, "kind": self.kind, "study": self.source.get("study")}
        return about | ({"other_budget": other} if other else {})


def build_rates(mapping: Any, name: str) -> RatesConfig:
    """The group's mapping, as composed from YAML. ConfigError for a file that is not one of rates."""
    keys = {"kind", "rates", "refused", "source"}
    if not isinstance(mapping, Mapping) or set(mapping) != keys:
        raise ConfigError("rates", name, f"its file must have the keys {', '.join(sorted(keys))}")
    kind, rates = mapping["kind"], mapping["rates"]
    if kind not in KINDS:
        raise ConfigError("rates.kind", kind, f"one of {', '.join(KINDS)}")
    if not isinstance(rates, Mapping) or not isinstance(mapping["source"], Mapping):
        raise ConfigError("rates", name, "rates and source must be groups of keys")
    if kind == "none" and rates:
        raise ConfigError("rates.kind", kind, f"and {name} has rates: kind is shared or per_rule")
    refused = mapping["refused"]
    if not isinstance(refused, list) or not all(isinstance(one, Mapping) for one in refused):
        raise ConfigError("rates.refused", refused, "must be a list of groups of keys")
    for size, value in rates.items():
        for key in (size, *(value if isinstance(value, Mapping) else ())):
            if not isinstance(key, str):
                raise ConfigError("rates", name, f"{key!r} is not the name of a size or rule")
        if (kind == "per_rule") != isinstance(value, Mapping):
            what = "must map rules to rates" if kind == "per_rule" else "must be a rate"
            raise ConfigError(f"rates.rates.{size}", value, f"{what}, as kind={kind} says")
        for rule, rate in value.items() if isinstance(value, Mapping) else [("", value)]:
            _check_rate(f"rates.rates.{size}" + (f".{rule}" if rule else ""), rate)
    return RatesConfig(name, kind, rates, tuple(refused), mapping["source"])


def check_not_set_twice(rates: RatesConfig, keys: Sequence[str]) -> None:
    """`keys` are those that the study and the command line set for its trials."""
    if rates.kind != "none" and LEARNING_RATE in keys:
        why = f"and {LEARNING_RATE} is set by the study or the command line; choose one"
        raise ConfigError("rates", rates.name, why)


def _check_rate(field: str, rate: Any) -> None:
    number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if not number or not 0 < rate <= sys.float_info.max:
        given = repr(rate) if isinstance(rate, str) else rate
        raise ConfigError(field, given, "must be a positive number")
