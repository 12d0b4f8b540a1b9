"""`-m` and Hydra's other flags: the same trials through Hydra's own command line. Torch-free.

Hydra hands the composed configuration to the task; from there on it is the ordinary path. Its basic launcher
ends a sweep at the first exception, so all trials are composed before the first begins, and the task keeps no
exception: each trial's exit code is noted, and only a stop signal ends the sweep. For grids that matter use
`python -m sweeps.launch`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnres import cli
from attnres.cli import EXIT_USER_ERROR, reject_options, take_option
from attnres.compose import Composed, compose_mapping, config_dir, user_error
from attnres.config import TrialConfig, build_trial_config
from attnres.errors import ConfigError, UserError
from attnres.lock import EXIT_BUSY, TrialBusy
from attnres.record import write_text_atomic
from attnres.stop import EXIT_CANCELLED
from attnres.wandb_key import hide
from attnres.words import counted

FLAGS = (
    "-m --multirun -c --cfg --resolve -p --package -i --info -s --shell_completion -sc --shell-completion "
    "--hydra-help --version --experimental-rerun -cn --config-name -r --run"
).split()
ALSO_ALLOWED = "--config-dir -cd --config-path -cp".split()
OTHER_ROOT = "-cp --config-path -cn --config-name".split()  # of these Hydra alone knows what they compose
STOPPED = (130, 143, EXIT_CANCELLED)


def wants_hydra(argv: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in FLAGS for word in argv)


def run_hydra(argv: Sequence[str], run: Callable[[TrialConfig], int]) -> int:
    """Hydra's command line with `run` as the task of each trial; the worst exit code of all trials."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    reject_options([word for word in argv if word.partition("=")[0] not in (*FLAGS, *ALSO_ALLOWED)])
    # Hydra's parser wants the overrides in one piece; people put -m anywhere.
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    flags = [word for word in argv if word not in overrides]
    _refuse_duplicates(overrides)
    if {"-m", "--multirun"} & set(flags) and not any(word.partition("=")[0] in OTHER_ROOT for word in argv):
        _compose_each(overrides, _extra_dir(argv))
    codes: list[int] = []

    def task(composed: Any) -> int:
        mapping: Any = OmegaConf.to_container(composed, resolve=True)
        _hide_key(Path(mapping["runs_dir"]) / mapping["study_name"] / "multirun.yaml")
        code = _guarded(lambda: run(build_trial_config(mapping)))
        codes.append(code)
        if code in STOPPED:
            raise SystemExit(code)
        return code

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["attnres.train", *overrides, *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand us the exception itself, not many lines and an exit
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="trial")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise user_error(error, overrides) from error
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
    if len(codes) > 1:
        print(f"{counted(len(codes), 'trial')}: {', '.join(_count(codes))}")
    if EXIT_BUSY in codes:
        codes.append(EXIT_USER_ERROR)  # as of one trial alone
    return next((code for code in (1, EXIT_USER_ERROR, 3) if code in codes), 0)


def _refuse_duplicates(overrides: Sequence[str]) -> None:
    """Hydra takes `seed=0,0` for two trials; they would be one. Of `seed=0 seed=1` it takes the last."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    given: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in given:
            raise ConfigError(key, value, f"is given twice, also as {key}={given[key]}")
        given[key] = value
        try:
            parsed = OverridesParser.create().parse_override(override)
            if isinstance(parsed.value(), Glob):
                raise ConfigError(key, value, "write the names themselves, with commas between")
            values = list(parsed.sweep_string_iterator()) if parsed.is_discrete_sweep() else []
        except HydraException as error:
            raise user_error(error, overrides) from error
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(parsed.key_or_group, twice, "is given twice")


def _hide_key(path: Path) -> None:
    """Hydra has written the command line there, before the first trial."""
    with suppress(FileNotFoundError):
        text = path.read_text(encoding="utf-8")
        if hide(text) != text:
            write_text_atomic(path, text)


def _compose_each(overrides: Sequence[str], extra_dir: str | None) -> None:
    """Compose each trial before the first begins. Hydra does so when its turn comes, and then ends."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    ours = [word for word in overrides if not word.startswith(("hydra.", "hydra/", "+hydra", "~"))]
    try:
        parsed = OverridesParser.create().parse_overrides(ours)
        (batch,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise user_error(error, overrides) from error
    composed: Composed = {}
    for words in batch:
        try:
            compose_mapping("trial", words, extra_dir, composed)
        except ConfigError as error:
            if error.why.startswith("unknown key"):  # then all its values are wrong
                given = dict(word.partition("=")[::2] for word in overrides)
                raise ConfigError(error.field, given[error.field], error.why) from None
            raise


def _extra_dir(argv: Sequence[str]) -> str | None:
    words = [f"--config-dir{word[3:]}" if word.partition("=")[0] == "-cd" else word for word in argv]
    return take_option(words, "--config-dir")


def _guarded(trial: Callable[[], int]) -> int:
    """The exit code of a trial, with what went wrong printed: one failure never stops the rest."""
    try:
        return trial()
    except UserError as error:
        print(f"error: {cli.one_line(str(error))}", file=sys.stderr)
        return EXIT_BUSY if isinstance(error, TrialBusy) else EXIT_USER_ERROR
    except Exception:
        print(hide(traceback.format_exc()), file=sys.stderr, end="")
        return 1


def _count(codes: Sequence[int]) -> list[str]:
    words = {
        0: "finished",
        3: "diverged",
        1: "failed",
        EXIT_USER_ERROR: "with a mistake in the settings",
        EXIT_BUSY: "being trained by another process",
    }
    return [f"{codes.count(code)} {word}" for code, word in words.items() if code in codes]
