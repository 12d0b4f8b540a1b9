"""Where a failure came from: the trial's own doing, which would come again, or from outside. Torch-free."""

from __future__ import annotations

import errno
from typing import Literal

from attnres.errors import DataError

Origin = Literal["own", "outside"]

# What the machine or its file systems do to a trial: another try on another day may fare better. A file that
# has gone is among them: a launch packs a corpus again that somebody has removed.
_OF_THE_MACHINE = {
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EFBIG EIO EROFS ENOMEM EAGAIN EMFILE ENFILE ESTALE ETIMEDOUT EREMOTEIO ENODEV "
        "ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH ECONNRESET ECONNREFUSED ECONNABORTED EPIPE "
        "ENOENT ENOTDIR"
    ).split()
    if hasattr(errno, name)
}


def origin_of(error: BaseException) -> Origin:
    """ "outside" if the error, or one that it was raised from, is the machine's: a full disk, a lost file
    system, no memory, data that went missing. Any other exception is the trial's own.
    """
    seen: BaseException | None = error
    while seen is not None:
        of_the_machine = isinstance(seen, OSError) and seen.errno in _OF_THE_MACHINE
        if of_the_machine or isinstance(seen, (MemoryError, DataError)):
            return "outside"
        seen = seen.__cause__
    return "own"
