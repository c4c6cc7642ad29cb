"""Logs: one line per event of the run, and none of what libraries remark on every start."""

import io
import json
import logging

import pytest

from horizonrl.common.logs import configure_logs, get_logger


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    sink = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    configure_logs(run="any", role="actor", stream=sink)
    return sink


def test_asyncios_remark_on_every_connection_with_tls_is_left_out_and_its_warnings_are_not(
    lines: io.StringIO,
) -> None:
    logging.getLogger("asyncio").warning(
        "returning true from eof_received() has no effect when using ssl"
    )
    logging.getLogger("asyncio").warning("Executing %s took 1.2 seconds", "a task")
    get_logger().info("role_tried", number=1)
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(each["event"], each["level"]) for each in said] == [
        ("Executing a task took 1.2 seconds", "warning"),
        ("role_tried", "info"),
    ]
