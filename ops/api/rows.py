"""Rows of a run's files: a sequence of dictionaries that becomes a data frame where pandas is installed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from horizonrl.common.errors import ConfigError, MissingDependency, did_you_mean


class Rows(Sequence[Mapping[str, Any]]):
    """Rows in the order of their file. A row is a mapping from a column's name to a JSON value."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        # Plain: a column that a program misspells is no damage of the file.
        self._rows = tuple(map(dict, rows))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "Mapping[str, Any] | Rows":
        return Rows(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __repr__(self) -> str:
        return f"Rows({len(self)} of {', '.join(self.columns)})"

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def column(self, name: str) -> list[Any]:
        """Return a value per row; None where a row has none. Raises ConfigError for a column that no row has."""
        columns = self.columns
        if self._rows and name not in columns:
            raise ConfigError(
                f"no column {name!r}{did_you_mean(name, columns)} `columns` lists all"
            )
        return [row.get(name) for row in self._rows]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`. Raises MissingDependency where pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise MissingDependency("data frames need pandas: pip install pandas") from error
        return pandas.DataFrame(list(self._rows))
