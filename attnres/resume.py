"""`python -m attnres.train --resume FOLDER`: a trial from what its folder says it is. Torch-free."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from attnres.config import TrialConfig, build_trial_config
from attnres.errors import ConfigError, UserError
from attnres.folder import CONFIG_FILE
from attnres.trial import Trial


def read_config(folder: Path) -> TrialConfig:
    """The configuration in a trial's folder, wherever the folder has been moved to. UserError if there is
    none, or none that this version can use.
    """
    path = folder / CONFIG_FILE
    try:
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(mapping, dict):
            raise UserError(f"--resume={folder}: {CONFIG_FILE} is not a trial's configuration")
        config = build_trial_config(mapping)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"--resume={folder}: is not a trial's folder (there is no {CONFIG_FILE})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--resume={folder}: {CONFIG_FILE} is torn: {error}") from None
    except ConfigError as error:
        raise UserError(f"--resume={folder}: {CONFIG_FILE}: {error}") from None
    parent = folder.absolute().parent
    if parent.name != config.study_name:
        why = f"{CONFIG_FILE} says study {config.study_name}: move it back below a folder of that name"
        raise UserError(f"--resume={folder}: {why}")
    if Path(config.runs_dir).absolute() == parent.parent:
        return config
    return dataclasses.replace(config, runs_dir=str(parent.parent))


def check_same(folder: Path, trial: Trial) -> None:
    """UserError if the configuration is another trial here and now than it was: its data has changed, say."""
    if trial.id != folder.absolute().name:
        why = f"its configuration is trial {trial.id} here (its data or this program have changed since)"
        raise UserError(f"--resume={folder}: {why}")
