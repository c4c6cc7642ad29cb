"""Functions of the user, named as `module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError


def absolute(name: str) -> str:
    """Return a function's name with the whole path of its file: a program runs in another directory."""
    place, colon, function = name.rpartition(":")
    return f"{Path(place).expanduser().resolve()}{colon}{function}" if place.endswith(".py") else name


def load_function(name: str) -> Callable[..., Any]:
    """Import a function. Raises ConfigError if it is not there; what its module raises is passed on."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(f"{name!r} names no function: write module:function or path/to/file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{place} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def _from_name(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module imports
        raise ConfigError(f"no module {name!r}: install it, or give the path of its file") from None


def _from_file(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"no file {file}: a relative path starts at the directory in which the command was run")
    name = f"program_{file.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As when Python runs the file: it finds its neighbours.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
