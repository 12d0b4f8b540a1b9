"""torchrun for the trial's own process: `python -m attnres.distributed.agent FOLDER PROCESSES`.

Signals that ask a trial to stop are not torchrun's business: its processes decide together, and torchrun
would kill them after half a minute. And it says in a file which of them failed and how, not in a banner.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from attnres.distributed import launched, messages
from attnres.output import hide_in_output
from attnres.stop import STOP_SIGNALS

AGENT_VARIABLE = "ATTNRES_AGENT_PID"
_TORCHRUN_HEEDS = "SIGHUP,SIGQUIT"


def main(folder: Path, processes: int) -> int:
    hide_in_output()
    launched.die_with_parent(launched.number(launched.PARENT_VARIABLE))
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the processes would inherit
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _TORCHRUN_HEEDS

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    words = f"--standalone --local-addr=127.0.0.1 --nproc-per-node={processes} --log-dir={folder}".split()
    arguments = parse_args([*words, "-m", "attnres.distributed.worker"])
    if hasattr(arguments, "signals_to_handle"):  # since torch 2.9 or so; before, the variable alone
        arguments.signals_to_handle = _TORCHRUN_HEEDS
    try:
        run(arguments)
    except ChildFailedError as error:
        failures = [{"rank": rank, "code": one.exitcode} for rank, one in error.failures.items()]
        messages.write(folder, messages.AGENT_FILE, failures)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
