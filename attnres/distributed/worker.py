"""One process of a trial that has several: what torchrun runs, `python -m attnres.distributed.worker`.

The trial's own process wants to know how it ended; torchrun does not pass on exit codes. So the first process
writes the outcome, and torchrun sees a failure only where there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from attnres.cli import EXIT_USER_ERROR
from attnres.config import build_trial_config
from attnres.data.corpus import open_corpus
from attnres.distributed import launched, messages
from attnres.distributed.agent import AGENT_VARIABLE
from attnres.distributed.group import LostProcess
from attnres.errors import UserError
from attnres.lock import TrialBusy
from attnres.output import hide_in_output
from attnres.stop import Preempted
from attnres.train import train
from attnres.trial import resolve


def main() -> int:
    hide_in_output()
    launched.die_with_parent(launched.number(AGENT_VARIABLE))
    folder = launched.messages_folder()
    assert folder is not None, "only a trial's own torchrun runs this; others run attnres.train"
    outcome, code = _train(folder)
    if outcome and launched.rank() == 0:
        messages.write(folder, messages.OUTCOME_FILE, outcome)
    return code


def _train(folder: Path) -> tuple[dict[str, Any] | None, int]:
    """The outcome, if it is one that all processes share, and this process' exit code."""
    try:
        config = build_trial_config(messages.read(folder, messages.CONFIG_FILE))
        corpus = open_corpus(config.data, config.model.context)
        train(resolve(config, corpus), corpus)
        return {"kind": "record"}, 0
    except Preempted as error:
        return {"kind": "stopped", "wish": error.wish}, 0
    except TrialBusy as error:
        return {"kind": "busy", "pid": error.pid}, 1
    except UserError as error:
        return {"kind": "mistake", "text": str(error)}, EXIT_USER_ERROR
    except LostProcess as error:
        print(f"process {launched.rank()}: {error}", file=sys.stderr)
        return None, 1


if __name__ == "__main__":
    launched.leave(main())
