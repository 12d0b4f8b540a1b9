"""Signs of life of processes on other machines, by this process's own clock.

The heartbeat of a machine whose locks are not seen here is a time by that machine's clock. If that clock is
ahead, a dead process looks alive for as long as it is ahead. Who looks more than once can do better: a
process that works writes a new heartbeat every few seconds, whatever its clock says.
"""

from __future__ import annotations

import time

from sweeps.state import STALE_SECONDS


class SignsOfLife:
    """What each process has last said, and when it was first seen here."""

    def __init__(self, patience_seconds: float = STALE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._seen: dict[str, tuple[float | None, float]] = {}  # heartbeat, and the time of this clock

    def silent_seconds(self, who: str, heartbeat: float | None) -> float:
        """Seconds since `who` was first seen with this heartbeat; 0 for a new one."""
        now = time.monotonic()
        before = self._seen.get(who)
        if before is None or before[0] != heartbeat:
            self._seen[who] = heartbeat, now
            return 0.0
        return now - before[1]

    def silent(self, who: str, heartbeat: float | None) -> bool:
        """Whether its heartbeat has stood still for longer than any step takes."""
        return self.silent_seconds(who, heartbeat) > self.patience_seconds
