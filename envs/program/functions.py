"""Functions of the user, named as `module:function` or `path/to/file.py:function`."""

import ast
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError, did_you_mean

_uncached: set[str] = set()
"""Folders of the user's files."""


class FromSource(SourceFileLoader):
    """Compiles a module anew: whoever can write to its folder can write a cache that says something else."""

    def path_stats(self, path: Any) -> Any:
        raise OSError(f"the cache of {path} is not used")


def absolute(name: str) -> str:
    """Return a function's name with the whole path of its file: a program runs in another directory."""
    module, colon, function = name.rpartition(":")
    return (
        f"{Path(module).expanduser().resolve()}{colon}{function}"
        if module.endswith(".py")
        else name
    )


def load_function(name: str) -> Callable[..., Any]:
    """Import a function. Raises ConfigError if it is not there; what its module raises is passed on."""
    source, function = _parts(name)
    module = _from_file(Path(source)) if source.endswith(".py") else _from_name(source)
    loaded = getattr(module, function, None)
    if not callable(loaded):
        raise ConfigError(f"{source} has no function {function!r}")
    return loaded  # type: ignore[no-any-return]


@cache
def require_function(name: str, arguments: int) -> None:
    """Raise ConfigError if there is no such function, or if it cannot take that many arguments.

    Its module is read, not imported, which may take seconds. What cannot be told that way is taken for right.
    """
    source, function = _parts(name)
    file = _existing(Path(source)) if source.endswith(".py") else _source(source)
    if file is None:
        return
    try:
        names = dict(_names(ast.parse(file.read_bytes()).body))
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}") from None
    if function not in names:
        if not {"*", "__getattr__"} & set(names):
            raise ConfigError(f"{file} has no function {function!r}{did_you_mean(function, names)}")
    elif (defined := names[function]) is not None and not _takes(defined, arguments):
        raise ConfigError(
            f"{file}, line {defined.lineno}: {function}({ast.unparse(defined.args)}) is called with {arguments} "
            f"argument{'s' if arguments > 1 else ''}: {'the task' if arguments == 1 else 'the task and the answer'}"
        )


def _parts(name: str) -> tuple[str, str]:
    source, _, function = name.rpartition(":")
    if not source or not function:
        raise ConfigError(
            f"{name!r} names no function: write module:function or path/to/file.py:function"
        )
    return source, function


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ConfigError(
            f"no file {file}: a relative path starts at the directory in which the command was run"
        )
    return file


def _source(module: str) -> Path | None:
    """Return the file of an installed module, if it is Python. Imports only the packages that it is in."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise _missing(module, error) from None
    if spec is None:
        raise _missing(module)
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


Defined = ast.FunctionDef | ast.AsyncFunctionDef


def _names(body: Iterable[ast.AST]) -> Iterator[tuple[str, Defined | None]]:
    """Yield the names that a module's statements define, each with its function if its signature is what it says."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, None if statement.decorator_list else statement
            case ast.ClassDef(name=name):
                yield name, None
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (
                    (alias.asname or alias.name.partition(".")[0], None) for alias in aliases
                )
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, None
            case _:  # an assignment, or a branch
                yield from _names(ast.iter_child_nodes(statement))


def _takes(function: Defined, count: int) -> bool:
    arguments = function.args
    most = len(arguments.posonlyargs) + len(arguments.args)
    needs_names = any(default is None for default in arguments.kw_defaults)
    return (
        most - len(arguments.defaults) <= count
        and (count <= most or bool(arguments.vararg))
        and not needs_names
    )


def _from_name(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _missing(name, error) from None


def _missing(name: str, error: ModuleNotFoundError | None = None) -> Exception:
    if error is not None and (error.name is None or not f"{name}.".startswith(f"{error.name}.")):
        return error  # a package that the module imports
    return ConfigError(f"no module {name!r}: install it, or give the path of its file")


def _from_file(file: Path) -> Any:
    folder = str(_existing(file).parent)
    # As when Python runs the file: it finds its neighbours.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if folder not in _uncached:
        _uncached.add(folder)
        sys.path_hooks.insert(0, _finder)
        sys.path_importer_cache.clear()
    name = _name(file)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file, loader=FromSource(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name(file: Path) -> str:
    """Return the file's own name if that is how its neighbours, and the processes that it spawns, can import it."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(file.stem)
        if spec is not None and spec.origin == str(file):
            return file.stem
    return f"program_{file.stem}"


def _finder(folder: str) -> FileFinder:
    """Find modules beside the user's file; a virtual environment there has caches of its own."""
    directory = Path(folder)
    if directory.is_relative_to(sys.prefix) or not any(
        directory.is_relative_to(users) for users in _uncached
    ):
        raise ImportError(f"{folder} is not the user's")
    return FileFinder(
        folder, (FromSource, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
    )
