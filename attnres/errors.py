"""Errors that a user can cause. Each is one line that names the field and the value."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend. Command lines print it as one line and exit 2, without a traceback."""


class ConfigError(UserError):
    """A setting that cannot be used: `field = value: why`."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"{field}={value if isinstance(value, str) else repr(value)}: {why}")
        self.field = field
        self.value = value
        self.why = why


class DataError(UserError):
    """A corpus that is missing, unreadable, too small or not what a record says it was."""


class RecordError(UserError):
    """A record file that is absent, torn or of another schema."""


class TornRecordError(RecordError):
    """A record file that is not whole: a disk's fault, for records are written atomically."""
