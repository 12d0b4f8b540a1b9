"""Imported by the fork server alone, before anything else: it leaves the terminal's session.

A signal of the terminal (Ctrl-C, or its closing) is for the launcher, which then asks the trials to save. A
server that died of it would take their exit codes along, and the launcher would not know when they end.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

if sys.argv[:1] == ["-c"] and "multiprocessing.forkserver" in sys.modules:
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
