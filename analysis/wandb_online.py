"""Runs of a W&B project through wandb.Api. Histories come from scan_history: history() samples rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from analysis.gate import StudyError
from analysis.wandb_runs import LoggedRun, Row, in_order
from attnres.errors import UserError
from attnres.wandb_key import has_key, reason

TIMEOUT_SECONDS = 30  # of a request; the client tries several times


def read_project(path: str, group: str | None) -> list[LoggedRun]:
    """Runs of `entity/project` (or of `project`, at the user's own entity), of one W&B group if given.

    Raises UserError, one line, for whatever the service or the way to it refuses; never asks for a key.
    """
    if not has_key():
        raise UserError(
            f"source=wandb:{path}: there is no such folder; for a project, there is no W&B key "
            "(WANDB_API_KEY, or `wandb login`)"
        )
    print(f"reading {path} from W&B; without a network it gives up after some minutes", file=sys.stderr)
    try:
        return [_run(run) for run in _listed(open_api(), path, group)]
    except UserError:
        raise
    except Exception as error:  # the client raises its own, requests', and ValueError for an unknown project
        raise StudyError(f"source=wandb:{path}: {reason(error)}") from None


def open_api() -> Any:
    """The client. Of what it offers, only runs(), and of a run only the attributes in `_run`, are used."""
    os.environ.setdefault("WANDB_SILENT", "true")  # our line is enough
    import wandb

    return wandb.Api(timeout=TIMEOUT_SECONDS)


def _listed(api: Any, path: str, group: str | None) -> list[Any]:
    return list(api.runs(path, filters={"group": group} if group else {}, order="+created_at"))


def _run(run: Any) -> LoggedRun:
    place = "/".join(run.path)
    return LoggedRun(
        place=place,
        name=run.name,
        group=run.group or "",
        config=dict(run.config),
        summary=dict(run.summary_metrics),
        rows=lambda: _rows(run, place),
    )


def _rows(run: Any, place: str) -> Sequence[Row]:
    """The whole history, read when it is needed."""
    try:
        return in_order(run.scan_history())
    except Exception as error:  # as above
        raise StudyError(f"{place}: history: {reason(error)}") from None
