"""Files that a user writes with one JSON object per line: questions, pages, tasks."""

from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from horizonrl.common.errors import ConfigError

R = TypeVar("R", bound=BaseModel)


def read_records(path: Path, kind: type[R], form: str) -> tuple[dict[int, R], str]:
    """Return the object of each line by the line's number, and the digest of the file.

    Raises ConfigError that names the file, the line and the `form` of an object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): a relative path starts at {Path.cwd()}, on every machine"
        ) from None
    records: dict[int, R] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                records[number] = kind.model_validate_json(line)
            except ValidationError as error:
                raise ConfigError(
                    f"{path}, line {number}: {explain(error, 'the line')}; write it as {form}"
                ) from None
    if not records:
        raise ConfigError(f"{path} has no line: write one JSON object a line as {form}")
    return records, sha256(content).hexdigest()


def explain(error: ValidationError, whole: str) -> str:
    """Return the first three problems of an object, each with its key; `whole` stands for that of the object."""
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or whole}: {problem['msg']}"
        for problem in error.errors()[:3]
    )
