"""Reads records of schema 1, so that the log of a run recorded before 0.1.0 replays after the upgrade.

Schema 2 renamed four fields and changed nothing else. This module goes with 0.2.0.
"""

from typing import Any

TICKET = {"issued": "issued_at_version", "seal": "signature"}
RENAMED: dict[str, dict[str, str]] = {
    "ticket": TICKET,
    "progress": {"met": "ended_ranges"},
    "horizon": {"issued": "tickets_issued"},
}
"""By record type, the fields of schema 1 that have another name in schema 2."""


def upgrade(name: str, body: Any) -> Any:
    """Return the body of a schema 1 record under the names of schema 2; a body that is no map stays as it is."""
    if not isinstance(body, dict):
        return body
    if name in ("group", "void"):
        return body | {"ticket": upgrade("ticket", body.get("ticket"))}
    renamed = RENAMED.get(name, {})
    return {renamed.get(field, field): value for field, value in body.items()}


def downgrade(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a record, without nested records, under the names of schema 1 and in the same order."""
    renamed = {new: old for old, new in RENAMED.get(name, {}).items()}
    return {renamed.get(field, field): value for field, value in body.items()}
