"""Where a failure came from: the trial's own doing, which would come again, or from outside. Torch-free."""

from __future__ import annotations

import errno
from typing import Literal

Origin = Literal["own", "outside"]

# What the machine or its file systems do to a trial: another try on another day may fare better.
_OF_THE_MACHINE = {
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EFBIG EIO EROFS ENOMEM EAGAIN EMFILE ENFILE ESTALE ETIMEDOUT EREMOTEIO ENODEV "
        "ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH ECONNRESET ECONNREFUSED ECONNABORTED EPIPE"
    ).split()
    if hasattr(errno, name)
}


def origin_of(error: BaseException) -> Origin:
    """ "outside" if the error, or one that it was raised from, is the machine's: a full disk, a lost file
    system, no memory. Any other exception is the trial's own.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno in _OF_THE_MACHINE):
            return "outside"
        seen = seen.__cause__
    return "own"
