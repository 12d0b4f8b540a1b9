"""Hydra's door: overrides -> composed YAML -> plain mapping, with Hydra's errors turned into one line.

Hydra accepts some mistakes in silence (`+group.typo=1`, a typo inside a preset, a launcher for a single run);
what this module does not reject, `config.build` does, because the composed keys are compared with the schema.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres.config import OPTIMIZERS, TrialConfig, build_trial_config
from attnres.errors import ConfigError, UserError
from attnres.residual.specs import SPECS

if TYPE_CHECKING:
    from omegaconf import DictConfig

# What Hydra composed of a choice of groups, for a caller with many compositions of the same files.
# It lives as long as the caller wants: files that change in between are not seen.
Composed = dict[tuple[str, ...], "DictConfig"]

_OFTEN_OWN = ("study", "search", "rates")  # groups of which users write files of their own

PACKAGE_DIR = Path(__file__).resolve().parent


def config_dir() -> Path:
    """Folder of the shipped YAML files: beside the package in a checkout, inside it in an installed wheel."""
    for candidate in (PACKAGE_DIR.parent / "conf", PACKAGE_DIR / "conf"):
        if (candidate / "trial.yaml").is_file():
            return candidate
    raise UserError(f"conf/trial.yaml: neither in {PACKAGE_DIR.parent} nor in {PACKAGE_DIR}; reinstall")


def group_options(extra_dir: str | None = None) -> dict[str, list[str]]:
    """Config groups and the names that each offers, shipped and in the user's own folder (`--config-dir`).

    UserError for a folder that does not exist: all that follows would name what is not found in it.
    """
    if extra_dir and not Path(extra_dir).is_dir():
        raise UserError(f"--config-dir={extra_dir}: no such folder")
    groups: dict[str, set[str]] = {}
    for root in [config_dir(), *([Path(extra_dir)] if extra_dir else [])]:
        for file in root.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(groups.items())}


def compose_mapping(
    config_name: str,
    overrides: Sequence[str],
    extra_dir: str | None = None,
    composed_groups: Composed | None = None,
) -> dict[str, Any]:
    """Compose `conf/<config_name>.yaml` with command-line overrides into a plain, resolved mapping.

    With `composed_groups` the files are read once for each choice of groups; values are put in afterwards.
    Raises ConfigError or UserError with one line for anything that Hydra or OmegaConf refuse.
    """
    # Imported here: `--help` and the analysis do not pay for Hydra.
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    options = group_options(extra_dir)
    given: dict[str, str] = {}
    for override in overrides:
        _check_override(override, options, extra_dir)
        key, _, value = override.partition("=")
        if key in given:  # Hydra would take the last in silence
            raise ConfigError(key, value, f"is given twice, also as {key}={given[key]}")
        given[key] = value
    extra = [f"hydra.searchpath=[file://{Path(extra_dir).resolve()}]"] if extra_dir else []
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            if composed_groups is None:
                composed = compose(config_name, overrides=[*overrides, *extra])
            else:
                chosen = tuple(word for word in overrides if word.partition("=")[0] in options)
                groups = (config_name, *chosen, *extra)
                if groups not in composed_groups:
                    composed_groups[groups] = compose(config_name, overrides=[*chosen, *extra])
                composed = _with_values(composed_groups[groups], [w for w in overrides if w not in chosen])
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except UnicodeDecodeError as error:
        raise UserError(f"a YAML file of {' '.join(overrides)} is not UTF-8 text ({error.reason})") from error
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise user_error(error, overrides) from error
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def _with_values(composed: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy with these values, as Hydra sets them; a key that does not exist is Hydra's error."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = copy.deepcopy(composed)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        try:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException(f"Could not override '{override.key_or_group}'.") from error
    return config


def compose_trial(
    overrides: Sequence[str], extra_dir: str | None = None, composed_groups: Composed | None = None
) -> TrialConfig:
    """Overrides such as `["model=cpu_50k", "residual=attnres_block", "seed=1"]` -> validated TrialConfig."""
    return build_trial_config(compose_mapping("trial", overrides, extra_dir, composed_groups))


def _check_override(override: str, options: Mapping[str, Sequence[str]], extra_dir: str | None) -> None:
    key, equals, value = override.partition("=")
    if not equals and not key.startswith("~"):
        raise UserError(f"{override}: not an override; write key=value, or --help for the keys")
    if key.startswith(("+", "~")):
        raise ConfigError(key, value, "keys are fixed: write it without + or ~ (an unknown key is an error)")
    if key.startswith("hydra.") or key.startswith("hydra/"):
        raise ConfigError(key, value, "Hydra's own settings take effect only with -m (multirun)")
    if key in options and value not in options[key] and value not in ("", "null"):
        close = difflib.get_close_matches(value, options[key], 1)
        hint = f"did you mean {close[0]}? " if close else ""
        # A study's folder in runs_dir does not have the study's file.
        own = "; your own files need --config-dir DIR" if key in _OFTEN_OWN and not extra_dir else ""
        raise ConfigError(key, value, f"{hint}one of {', '.join(options[key])}{own}")
    _check_grammar(override, key, value, key in options)


def _check_grammar(override: str, key: str, value: str, is_group: bool) -> None:
    """Hydra reads values by its own grammar: lists in [], sweeps by commas, quotes for special characters."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        raise ConfigError(
            key, value, "cannot be read; lists are [1,2], and 'quote' special characters"
        ) from None
    if parsed.is_sweep_override():
        raise ConfigError(key, value, "several values: add -m to run each, or write a list as [1,2]")
    if is_group and not isinstance(parsed.value(), (str, list, type(None))):
        raise ConfigError(key, value, "reads as a number or as true or false; give its file another name")


def _hint(field: str) -> str:
    """What the user may have meant by a key that does not exist."""
    known = [f.name for f in dataclasses.fields(TrialConfig)] + ["study", "launch"]
    for top, kind in typing.get_type_hints(TrialConfig).items():
        several = {"residual": SPECS.values(), "optim": OPTIMIZERS.values()}
        kinds = several.get(top, [kind])
        known += [
            f"{top}.{f.name}" for k in kinds if dataclasses.is_dataclass(k) for f in dataclasses.fields(k)
        ]
    if field in known:  # an option of another rule or optimizer
        return f"; another choice of {field.partition('.')[0]} has it"
    close = difflib.get_close_matches(field, known, 1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def user_error(error: Exception, overrides: Sequence[str]) -> UserError:
    """Hydra's many-line message -> one line that names the field and, where the user gave it, the value."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    given = dict(override.partition("=")[::2] for override in overrides)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        field = unknown.group(1)
        return ConfigError(field, given.get(field, ""), f"unknown key{_hint(field)}")
    if not text:
        cause = error.__cause__ or error
        why = re.sub(r"\s+", " ", str(cause)).strip() or type(cause).__name__
        files = [f"{key}={value}" for key, value in given.items() if "." not in key]
        text = f"{' '.join(files)}: one of these YAML files cannot be used: {why}"
    return UserError(_one_line(text, given))


def _one_line(text: str, given: Mapping[str, str]) -> str:
    if missing := re.search(r"Missing mandatory value: .*full_key: (\S+)", text):
        return f"{missing.group(1)}: is missing; give {missing.group(1)}=..."
    if bad := re.search(r"Interpolation key '([^']+)' not found full_key: (\S+)", text):
        field = bad.group(2)
        return f"{field}={given.get(field, '')}: there is no key {bad.group(1)} to take the value from"
    if none := re.search(r"Could not find '[^']*' Available options in '([^']+)': (.*?) Config search", text):
        group, names = none.groups()
        return f"{group}={given.get(group, '')}: one of {', '.join(names.split())}"
    text = re.sub(r"reference_type=\S+|object_type=\S+", "", text).replace("full_key: ", "key ")
    return text.strip()
