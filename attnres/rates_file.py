"""Learning rates that a study uses, as a file of the config group `rates`; every command that finds some
writes it here. Torch-free.

docs/hyperparameters.md has the format; sweeps.rates reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnres.cli import take_flag, take_option
from attnres.config import NAME_PATTERN
from attnres.errors import ConfigError, UserError
from attnres.record import write_text_atomic

GROUP = "rates"
DIGITS = 4  # of a rate: no optimum is known better, and ids of trials must not hang on a last bit

Kind = Literal["shared", "per_rule"]


@dataclass(frozen=True)
class Optimum:
    """The rate chosen for a size and a rule, and what it rests on."""

    size: str
    rule: str
    rate: float
    about: Mapping[str, Any]  # interval, neighbours, loss, trials: plain data


@dataclass(frozen=True)
class Refusal:
    """A size and a rule without a rate."""

    size: str
    rule: str
    why: str


@dataclass(frozen=True)
class Target:
    """Where the file goes: DIR/rates/NAME.yaml."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def usage(self) -> str:
        return f"rates={self.name} --config-dir {self.path.parent.parent}"


def parse_target(text: str, config_dir: str | None) -> Target:
    """`NAME` (with --config-dir) or `DIR/rates/NAME.yaml`. ConfigError for what no study could use."""
    path = Path(text)
    if NAME_PATTERN.fullmatch(text) and path.suffix != ".yaml" and text != "none":
        if config_dir is None:
            why = f"goes into a folder of yours: add --config-dir DIR, or write DIR/{GROUP}/{text}.yaml"
            raise ConfigError("--write-rates", text, why)
        return Target(Path(config_dir) / GROUP / f"{text}.yaml")
    if path.suffix != ".yaml" or path.absolute().parent.name != GROUP:
        why = f"studies find such a file as DIR/{GROUP}/NAME.yaml (by {GROUP}=NAME --config-dir DIR)"
        raise ConfigError("--write-rates", text, why)
    if not NAME_PATTERN.fullmatch(path.stem) or path.stem == "none":
        raise ConfigError("--write-rates", text, "a name has 1 to 64 letters, digits, . _ -, and is not none")
    return Target(path)


@dataclass(frozen=True)
class Choice:
    """What --write-rates asks for."""

    target: Target
    kind: Kind


def take_choice(argv: list[str], needs_choice: bool = True) -> Choice | None:
    """Take --write-rates, --shared, --per-rule and --config-dir from a command line.

    `needs_choice`: --config-dir is for nothing else there.
    """
    text, config_dir = take_option(argv, "--write-rates"), take_option(argv, "--config-dir")
    shared, per_rule = take_flag(argv, "--shared"), take_flag(argv, "--per-rule")
    if text is None:
        for given, option in (
            (shared, "--shared"),
            (per_rule, "--per-rule"),
            (config_dir and needs_choice, "--config-dir"),
        ):
            if given:
                unneeded = "a report needs no config files; it " if option == "--config-dir" else ""
                raise UserError(f"{option}: {unneeded}goes with --write-rates")
        return None
    if shared and per_rule:
        raise ConfigError("--write-rates", text, "--shared and --per-rule are both given; choose one")
    return Choice(parse_target(text, config_dir), "per_rule" if per_rule else "shared")


def write_rates_file(
    target: Target,
    kind: Kind,
    optima: Sequence[Optimum],
    refused: Sequence[Refusal],
    source: Mapping[str, Any],
) -> None:
    """Write the config file, atomically. UserError if there is no rate at all, or another file is there."""
    if not optima:
        reasons = "; ".join(f"{one.size} {one.rule}: {one.why}" for one in refused)
        raise UserError(f"--write-rates={target.path}: no rate to write: {reasons}")
    rates: dict[str, Any] = {}
    for one in optima:
        if kind == "shared":
            rates[one.size] = rounded(one.rate)
        else:
            rates.setdefault(one.size, {})[one.rule] = rounded(one.rate)
    mapping = {
        "kind": kind,
        "rates": rates,
        "refused": [vars(one) for one in refused],
        "source": {
            **source,
            "optima": [
                {"size": one.size, "rule": one.rule, "rate": rounded(one.rate), **one.about} for one in optima
            ],
        },
    }
    _check_not_another(target, rates, kind)
    write_text_atomic(target.path, _text(target, kind, mapping))


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _check_not_another(target: Target, rates: Mapping[str, Any], kind: str) -> None:
    """A file with other rates is not replaced: studies that were launched with it would go on with these."""
    import yaml

    try:
        loader = _loader()(target.path.read_text(encoding="utf-8"))  # a safe one: it builds plain values only
        there = loader.get_single_data()
    except FileNotFoundError:
        return
    except (UnicodeDecodeError, yaml.YAMLError):
        there = None
    if not isinstance(there, dict) or (there.get("kind"), there.get("rates")) != (kind, rates):
        why = "exists, with other content; choose another name, or remove it"
        raise UserError(f"--write-rates={target.path}: {why}")


def _text(target: Target, kind: str, mapping: Mapping[str, Any]) -> str:
    import yaml

    what = "of each size, for all rules" if kind == "shared" else "of each size and rule"
    head = [
        f"# Peak learning rates {what}, found by {mapping['source'].get('command', 'this project')}.",
        f"# Use: python -m sweeps.launch study=NAME {target.usage}",
    ]
    lines = [re.sub(r"[^\x20-\x7e]", "?", line) for line in head]
    return "\n".join(lines) + "\n" + yaml.safe_dump(dict(mapping), sort_keys=False, width=110)


def _loader() -> Any:
    """PyYAML's, but 1e-3 is a number, as it is to OmegaConf."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader
