"""W&B's local run files, read without its service: offline-run-*/run-*.wandb in any folder.

The file is a LevelDB log (blocks of 32 KiB; chunks of CRC-32, length, kind) behind seven bytes of its own;
every record is a protobuf message that the client's package defines. `wandb leet inspect --json` prints the
same, but takes 1.5 s for each run, and only the newest clients have it; a test compares the two.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.gate import StudyError
from analysis.wandb_runs import LoggedRun, in_order

FILE_HEADER = b":W&B\xe1\xbe\x00"  # identification, magic number, version 0
BLOCK = 32 * 1024
CHUNK = struct.Struct("<IHB")  # CRC-32 of kind and data, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class BrokenFile(Exception):
    """A run file that cannot be read to its end; the text says why."""


def read_folder(folder: Path) -> list[LoggedRun]:
    """Every run at or below a folder, by name of its file. Raises StudyError where there is none."""
    paths = sorted({path.resolve(): path for path in folder.rglob("run-*.wandb")}.values())
    if not paths:
        raise StudyError(f"source=wandb:{folder}: there is no W&B run (offline-run-*/run-*.wandb) in it")
    return [read_run(path) for path in paths]


def read_run(path: Path) -> LoggedRun:
    """One run file. What comes before a broken place is kept, and `broken` says what is the matter."""
    # A second to import: only when there is something to read.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2

    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    name, group, broken = path.stem, "", None
    try:
        for data in read_log(path.read_bytes()):
            record = messages.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name, group = record.run.display_name or name, record.run.run_group
                _update(config, record.run.config)
                _update(summary, record.run.summary)
            elif kind == "config":
                _update(config, record.config)
            elif kind == "summary":
                _update(summary, record.summary)
            elif kind == "history":
                row = {_key(item)[0]: json.loads(item.value_json) for item in record.history.item}
                (numbered,) = in_order([{"_step": record.history.step.num, **row}])
                step = numbered["_step"]
                rows[step] = {**rows.get(step, {}), **numbered}
    except BrokenFile as error:
        broken = str(error)
    except OSError as error:
        broken = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError, DecodeError) as error:
        broken = f"holds what this version of wandb cannot read ({error})"
    ordered = in_order(rows.values())
    return LoggedRun(str(path), name, group, config, summary, lambda: ordered, broken)


def read_log(data: bytes) -> Iterator[bytes]:
    """Messages of a LevelDB log. Raises BrokenFile where it is cut off or damaged, after what is whole."""
    if data[: len(FILE_HEADER)] != FILE_HEADER:
        raise BrokenFile("is empty" if not data else "is not a run file of W&B")
    position, message = len(FILE_HEADER), b""
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < CHUNK.size:  # no chunk begins in the last bytes of a block
            position += left
            continue
        if position + CHUNK.size > len(data):
            raise BrokenFile("is cut off, or still being written")
        checksum, length, kind = CHUNK.unpack_from(data, position)
        position += CHUNK.size
        if checksum == length == kind == 0 and not any(data[position:]):
            raise BrokenFile("is cut off: it ends in zeros")
        chunk = data[position : position + length]
        if len(chunk) < length:
            raise BrokenFile("is cut off, or still being written")
        if kind not in (FULL, FIRST, MIDDLE, LAST) or zlib.crc32(bytes([kind]) + chunk) != checksum:
            raise BrokenFile(f"is damaged at byte {position}")
        message = chunk if kind in (FULL, FIRST) else message + chunk
        position += length
        if kind in (FULL, LAST):
            yield message
            message = b""
    if message:
        raise BrokenFile("is cut off, or still being written")


def _update(values: dict[str, Any], change: Any) -> None:
    """Apply the updates and removals of a config or summary message."""
    for item in change.update:
        *parents, last = _key(item)
        place = values
        for parent in parents:
            inner = place.get(parent)
            place[parent] = place = inner if isinstance(inner, dict) else {}
        place[last] = json.loads(item.value_json)
    for item in change.remove:
        *parents, last = _key(item)
        place = values
        for parent in parents:
            place = place.get(parent, {})
        place.pop(last, None)


def _key(item: Any) -> list[str]:
    return list(item.nested_key) or [item.key]
