"""What differs between two configs."""

from collections.abc import Mapping
from typing import Any


def config_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], absent: Any = None
) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two nested tables, as `section.key: (before, after)`.

    A key that only one of them has is `absent` in the other.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, absent), after.get(key, absent)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = config_changes(old, new, absent)
            changed |= {f"{key}.{name}": pair for name, pair in inner.items()}
        elif old != new:
            changed[key] = (old, new)
    return changed
