"""What a study chooses from, as its YAML writes it: sizes, residual rules, values of a trial's keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.errors import ConfigError

# What names a size and what it starts from; the batch and the learning rate are a size's to change.
_NOT_OF_A_SIZE = ("model", "model.name", "residual", "seed", "study_name", "runs_dir")


@dataclass(frozen=True)
class SizeChoice:
    """A size of the study: a config of the group `model`, or other values under a name of their own."""

    name: str
    base: str  # config of the group `model`
    options: Mapping[str, Any]  # trial keys, dotted

    @property
    def overrides(self) -> list[str]:
        renamed = [f"model.name={override_value(self.name)}"] if self.name != self.base else []
        changed = [f"{key}={override_value(value)}" for key, value in self.options.items()]
        return [f"model={self.base}", *renamed, *changed]

    def without(self, keys: set[str], groups: set[str]) -> SizeChoice:
        """Without what a command line sets: the same keys, and all keys of the groups that it chooses."""
        kept = {k: v for k, v in self.options.items() if k not in keys and k.partition(".")[0] not in groups}
        return SizeChoice(self.name, self.base, kept)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RuleChoice:
    """A residual rule of the study: a config of the group `residual`, and options on top of it."""

    name: str
    options: Mapping[str, Any]

    @property
    def overrides(self) -> list[str]:
        return [
            f"residual={self.name}",
            *(f"residual.{k}={override_value(v)}" for k, v in self.options.items()),
        ]

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True)
class Axis:
    """A trial key and the values that the study gives it."""

    key: str
    values: tuple[Any, ...]

    def override(self, value: Any, groups: Mapping[str, Sequence[str]]) -> str:
        return f"{self.key}={value if self.key in groups else override_value(value)}"


def parse_size(choice: Any, known: Sequence[str]) -> SizeChoice:
    """`cpu_50k`, or `{size: deep, base: cpu_50k, depth: 16, budget.tokens: 1e6}`: a key without a dot is the
    model's. ConfigError for a base that does not exist."""
    if isinstance(choice, Mapping):
        size, base = choice.get("size"), choice.get("base", choice.get("size"))
        if not isinstance(size, str) or not isinstance(base, str):
            raise ConfigError(
                "study.sizes", choice, "a size is a name, or {size: name, base: name, key: value}"
            )
        check_name("study.sizes", base, known)
        options = {
            k if "." in str(k) else f"model.{k}": v for k, v in choice.items() if k not in ("size", "base")
        }
        for key in options:
            if key in _NOT_OF_A_SIZE or key.startswith("residual."):
                raise ConfigError("study.sizes", size, f"cannot set {key}")
        return SizeChoice(size, base, options)
    check_name("study.sizes", choice, known)
    return SizeChoice(str(choice), str(choice), {})


def parse_rule(choice: Any, known: Sequence[str]) -> RuleChoice:
    """`prenorm`, or `{rule: attnres_block, num_blocks: 2}`."""
    if isinstance(choice, str):
        rule = RuleChoice(choice, {})
    elif isinstance(choice, Mapping) and isinstance(choice.get("rule"), str):
        rule = RuleChoice(choice["rule"], {str(key): value for key, value in choice.items() if key != "rule"})
    else:
        raise ConfigError("study.rules", choice, "a rule is a name, or {rule: name, option: value}")
    check_name("study.rules", rule.name, known)
    return rule


def parse_axes(axes: Mapping[Any, Any]) -> list[Axis]:
    """`{optim.learning_rate: [..]}` and `{optim: {learning_rate: [..]}}` mean the same."""
    parsed = []
    for key, values in _flat(axes).items():
        if not isinstance(values, list):
            raise ConfigError(f"study.axes.{key}", values, "must be a list of values")
        parsed.append(Axis(key, tuple(values)))
    return parsed


def _flat(axes: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in axes.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def check_name(field: str, name: Any, known: Sequence[str]) -> None:
    """ConfigError, with the nearest name, unless the config group has one of this name."""
    if name not in known:
        close = difflib.get_close_matches(str(name), known, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(field, name, f"{hint}one of {', '.join(known)}")


def override_value(value: Any) -> str:
    """A plain value as Hydra's override grammar writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(override_value, value)) + "]"
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
