"""Functions of other packages that a recipe names as `MODULE:FUNCTION`; errors name their file and line."""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from horizonrl.common.errors import ConfigError, HorizonError, did_you_mean


def load_choice(
    key: str, name: str, choices: Mapping[str, str], *parameters: str
) -> Callable[..., Any]:
    """Import what a key of the config names: one of our `choices`, or a function of another package.

    Raises ConfigError for an unknown name, and as `load_function` does.
    """
    if ":" in name:
        return load_function(key, name, *parameters)
    if name not in choices:
        raise ConfigError(
            f"{key} is {name!r}: choose {', '.join(choices)}, or MODULE:FUNCTION of an installed package"
            f"{did_you_mean(name, choices)}"
        )
    module, _, function = choices[name].partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


def load_function(key: str, path: str, *parameters: str) -> Callable[..., Any]:
    """Import the function that a key of the config names.

    Raises ConfigError if there is none, if its module does not import, or if it cannot be called with `parameters`.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"{key} is {path!r}: name a function as MODULE:FUNCTION")
    try:
        with attributed(f"{key} = {path!r}", "cannot be imported", module_name):
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} is {path!r}, but this Python has no module {error.name!r}: pip install the package that has it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        others = [
            other
            for other, value in vars(module).items()
            if callable(value) and not other.startswith("_")
        ]
        raise ConfigError(
            f"{key} is {path!r}, but {module.__file__} has no function {name!r}{did_you_mean(name, others)}"
        )
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} is {path!r}, which is called as {name}({', '.join(parameters)}): {error} ({definition(function)})"
        ) from None
    return function  # type: ignore[no-any-return]


@contextmanager
def attributed(subject: str, trouble: str, module: str) -> Iterator[None]:
    """Raise ConfigError, with the file and line of the package's code, for whatever that code raises in the body."""
    try:
        yield
    except HorizonError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(describe(error, subject, trouble, raised_at(error, module))) from error
    except Exception as error:  # the boundary: the package may be anybody's
        if type(error).__name__ == "OutOfMemoryError":  # torch's; the learner tries once more
            raise
        raise ConfigError(describe(error, subject, trouble, raised_at(error, module))) from error


def definition(function: Callable[..., Any]) -> str:
    """Return `file:line` of a function, or its module if it has no source file."""
    return source_line(function) or f"module {function.__module__}"


def source_line(function: Callable[..., Any]) -> str | None:
    """Return `file:line` of a function; None for a compiled one, or a class created at run time."""
    function = inspect.unwrap(function)
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        return None


def describe(error: BaseException, subject: str, trouble: str, position: str) -> str:
    """Return one line that says what a package's code raised, and where."""
    says = error.msg if isinstance(error, SyntaxError) else error
    return f"{subject} {trouble}: {type(error).__name__}: {says} ({position})"


def raised_at(error: BaseException, module: str, otherwise: str | None = None) -> str:
    """Return `file:line` of the last line of the package's code that ran.

    If none did, `otherwise`, or else the module.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    package = module.partition(".")[0]
    frames = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    return frames[-1] if frames else otherwise or f"module {module}"
