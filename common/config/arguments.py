"""Arguments of the Python API, checked against their annotations: a wrong one is a ConfigError that names it."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from pydantic import InstanceOf, TypeAdapter, ValidationError

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, HorizonError

P = ParamSpec("P")
T = TypeVar("T")
_MODULE = re.compile(r"\b(?:\w+\.)+(?=\w)")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function of the API that raises ConfigError for arguments of a wrong type, and for wrong paths."""
    signature = inspect.signature(function)
    kinds = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not parameter.empty
    }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        require_kinds(function.__name__, signature.bind(*args, **kwargs).arguments, kinds)
        try:
            return function(*args, **kwargs)
        except HorizonError:
            raise
        except OSError as error:
            if error.filename is None:
                raise
            raise ConfigError(
                f"{error.filename}: {error.strerror}: give another path, or fix this one"
            ) from None

    return call


def require_kinds(name: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise ConfigError unless each value is of its kind, an annotation; `name` is what takes the values."""
    for argument, kind in kinds.items():
        try:
            if argument in values:
                _adapter(kind).validate_python(values[argument], strict=True)
        except ValidationError:
            value = values[argument]
            recipe = kind is RunConfig and isinstance(value, str)
            hint = f"; pass load_recipe({value!r})" if recipe else ""
            raise ConfigError(
                f"{name}: {argument} is {value!r}, and should be {_words(kind)}{hint}"
            ) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # A class means its instances: pydantic would make a config of a dict.
    return TypeAdapter(InstanceOf[kind] if inspect.isclass(kind) else kind)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    words = _MODULE.sub("", inspect.formatannotation(kind)).replace(" | None", ", or None")
    return words.replace("Sequence[", "list[").replace("Mapping[", "dict[")
