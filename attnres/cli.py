"""What every command line shares: help text with groups and examples, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from attnres.compose import group_options
from attnres.errors import UserError

EXIT_USER_ERROR = 2


def run_command(main: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Call `main(argv)`; a UserError becomes one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        return main(list(sys.argv[1:] if argv is None else argv))
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
        return 1


def one_line(text: str) -> str:
    """Values from files may hold line ends and terminal codes: they are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wants_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)


def take_option(argv: list[str], name: str) -> str | None:
    """Remove `--name value` or `--name=value` from argv and return the value."""
    for index, word in enumerate(argv):
        if word == name:
            if index + 1 == len(argv):
                raise UserError(f"{name}: needs a value")
            value = argv[index + 1]
            del argv[index : index + 2]
            return value
        if word.startswith(name + "="):
            del argv[index]
            return word.partition("=")[2]
    return None


def take_flag(argv: list[str], name: str) -> bool:
    """Remove `--name` from argv and say whether it was there."""
    present = name in argv
    argv[:] = [word for word in argv if word != name]
    return present


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
