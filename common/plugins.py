"""Functions of other packages that a recipe names as `MODULE:FUNCTION`; errors name their file and line."""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from horizonrl.common.errors import ConfigError, HorizonError, did_you_mean


def require_choice(key: str, name: str, choices: Collection[str], *parameters: str) -> None:
    """Raise ConfigError unless a key of the config names one of our `choices`, or a function of another package.

    What we bring is not imported: it may need packages of another role.
    """
    if ":" in name:
        load_function(key, name, *parameters)
    elif name not in choices:
        raise ConfigError(
            f"{key} is {name!r}: choose {', '.join(choices)}, or MODULE:FUNCTION of an installed package"
            f"{did_you_mean(name, choices)}"
        )


def load_choice(
    key: str, name: str, choices: Mapping[str, str], *parameters: str
) -> Callable[..., Any]:
    """Import what a key of the config names: one of our `choices`, or a function of another package.

    Raises ConfigError for an unknown name, and as `load_function` does.
    """
    require_choice(key, name, choices, *parameters)
    module, _, function = choices.get(name, name).partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


def load_function(
    key: str,
    path: str,
    *parameters: str,
    options: Collection[str] = (),
    keys: Collection[str] = (),
) -> Callable[..., Any]:
    """Import the function that a key of the config names.

    Raises ConfigError if there is none, if its module does not import, or if it cannot be called with `parameters` and
    with `options` as keywords. The options stand beside `key`, where the section has `keys` of its own.
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
        signature = inspect.signature(function)
        keywords = _keywords(signature, parameters)
        unknown = [option for option in options if keywords is not None and option not in keywords]
        if not unknown:
            signature.bind(*parameters, **dict.fromkeys(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} is {path!r}, which is called as {name}({', '.join(parameters)}): {error} ({definition(function)})"
        ) from None
    if unknown:
        section = key.rpartition(".")[0]
        meant = did_you_mean(unknown[0], [*keys, *(keywords or ())])
        takes = f" It takes {', '.join(keywords)}" if keywords else ""
        raise ConfigError(
            f"{section}.{unknown[0]}: neither a key of {section} nor an option of {path}{meant}{takes} "
            f"({definition(function)})"
        )
    return function  # type: ignore[no-any-return]


def _keywords(signature: inspect.Signature, positional: Sequence[str]) -> list[str] | None:
    """Return the keywords that a function takes besides positional arguments; None if it takes any.

    Raises TypeError if it does not take so many.
    """
    filled = signature.bind_partial(*positional).arguments
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in by_name and parameter.name not in filled
    ]


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
