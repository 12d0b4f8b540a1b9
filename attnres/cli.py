"""What every command line shares: help text with groups and examples, and errors as one line."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType

from attnres.compose import group_options
from attnres.errors import UserError
from attnres.wandb_key import hide

EXIT_USER_ERROR = 2


def run_command(main: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Call `main(argv)`; a UserError becomes one line on stderr and exit code 2, Ctrl-C exit code 130.

    Output that cannot be written (a full disk, a closed stdout) is an error too, exit code 1.
    """
    sys.excepthook = _say_traceback  # of what nobody catches: it may go to a log as well
    try:
        _open_standard_files()
        code = main(list(sys.argv[1:] if argv is None else argv))
        _flush()  # here, where a full disk still can be told; at exit Python would only mumble
        return code
    except UserError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head` closed our output
        sys.stderr.close()
        return 141
    except OSError as error:  # full disk, read-only folder, missing file: the path, and no traceback
        said = f"{error.filename or 'operating system'}: {error.strerror or error}"
        print(f"error: {one_line(said)}", file=sys.stderr)
        _drop_output()
        return 1


def _say_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(hide("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = "standard output"
        raise


class _ClosedOutput(io.TextIOBase):
    """Stands for a stdout that was closed (`>&-`): printing to it is not done in silence."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "is closed, and there is something to print", "standard output")


def _open_standard_files() -> None:
    """Where stdin, stdout or stderr is closed, no other file may get its number: prints would go into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")


def _drop_output() -> None:
    """What a full disk did not take would be tried again at exit, with a traceback."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def one_line(text: str) -> str:
    """Values may hold line ends and terminal codes, which are written as escapes, and keys, which are not."""
    text = hide(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wants_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)


def take_option(argv: list[str], name: str) -> str | None:
    """Remove `--name value` or `--name=value` from argv and return the value, which is not empty."""
    places = [index for index, word in enumerate(argv) if word == name or word.startswith(name + "=")]
    if not places:
        return None
    _check_once(name, len(places))
    index = places[0]
    joined = argv[index] != name
    words = argv[index : index + (1 if joined else 2)]
    value = words[0].partition("=")[2] if joined else "".join(words[1:])
    if not value:
        raise UserError(f"{name}: needs a value")
    del argv[index : index + len(words)]
    return value


def take_flag(argv: list[str], name: str) -> bool:
    """Remove `--name` from argv and say whether it was there."""
    _check_once(name, argv.count(name))
    present = name in argv
    argv[:] = [word for word in argv if word != name]
    return present


def _check_once(name: str, times: int) -> None:
    if times > 1:
        raise UserError(f"{name}: is given {'twice' if times == 2 else f'{times} times'}")


def reject_options(argv: Sequence[str]) -> None:
    """What is left and starts with a dash is a mistake."""
    for word in argv:
        if word.startswith("-"):
            raise UserError(f"{word}: unknown option; --help lists the options")


def help_text(usage: str, groups: Sequence[str], examples: Sequence[str]) -> str:
    """Usage, the config groups with their choices (of a command that has some), and examples."""
    lines = [usage.strip()]
    if groups:
        available = group_options()
        lines += ["", "Config groups (choose with group=name):"]
        lines += [f"  {group:10s} {', '.join(available.get(group, []))}" for group in groups]
    lines += ["", "Examples:", *(f"  {example}" for example in examples)]
    return "\n".join(lines)
