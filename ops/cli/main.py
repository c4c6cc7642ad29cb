"""The entry point of `horizonrl`: parse, run one command, and turn errors into messages and exit codes."""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from horizonrl.common.errors import DISK_FULL, ConfigError, HorizonError, MissingDependency
from horizonrl.common.texts import printable
from horizonrl.ops.cli.parser import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 would fail the same way again, 130 interrupted."""
    sys.excepthook = _show_defect
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not where a program redirects it
            stream.reconfigure(errors="replace")  # a terminal of ASCII gets `?`, no traceback
    try:
        _refuse_bytes(words)
        arguments, overrides = parse(words)
        code: int = arguments.execute(arguments, overrides)
        return code
    except HorizonError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        # A light install lacks packages by design: name the one to install instead of a traceback.
        package = (error.name or "").partition(".")[0]
        if package in ("", "horizonrl"):
            raise  # our own module is missing: a defect, not something to install
        print(
            f"error: `horizonrl {words[0]}` needs the package {package}, which is not installed here: "
            "pip install 'horizonrl[cpu]', or see `horizonrl doctor`",
            file=sys.stderr,
        )
        return MissingDependency.exit_code
    except BrokenPipeError:
        # `horizonrl ... | head`: keep Python from reporting it once more as it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in DISK_FULL:
            cure = "free some space, then give the same command again"
        elif error.filename is not None:
            cure = "give another path, or fix this one"
        else:
            raise
        prefix = f"{error.filename}: " if error.filename else ""
        print(f"error: {prefix}{error.strerror}: {cure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _refuse_bytes(words: Sequence[str]) -> None:
    """Raise ConfigError for a word that Python could not decode: no file that names it could be written."""
    for word in words:
        if word.encode(errors="replace").decode() != word:
            raise ConfigError(
                f"{word!r} is no text in this locale ({sys.getfilesystemencoding()}): set LC_ALL=C.UTF-8 "
                "and give the same command again, or choose another name"
            )


def _show_defect(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback as Python does. What its message quotes, a stranger may have written."""
    lines = traceback.format_exception(kind, error, trace)
    print(printable("".join(lines)), file=sys.stderr, end="")


if __name__ == "__main__":
    sys.exit(main())
