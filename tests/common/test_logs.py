"""Logs: one line per event of the run, and none of what libraries remark on every start."""

import io
import json
import logging

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.common.logs import LEVEL, configure_logs, get_logger


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


@pytest.mark.parametrize(
    ("level", "events"),
    [
        ("info", ["role_tried", "lost"]),
        ("debug", ["looked_closer", "role_tried", "connected", "lost"]),
    ],
)
def test_a_variable_lets_everybody_say_more(
    monkeypatch: pytest.MonkeyPatch, level: str, events: list[str]
) -> None:
    monkeypatch.setenv(LEVEL, level)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    sink = io.StringIO()
    configure_logs(run="any", role="actor", stream=sink)
    get_logger().debug("looked_closer")
    get_logger().info("role_tried")
    logging.getLogger("nats").info("connected")
    logging.getLogger("nats").warning("lost")
    assert [json.loads(line)["event"] for line in sink.getvalue().splitlines()] == events
    monkeypatch.delenv(LEVEL)
    configure_logs(run="any", role="actor", stream=sink)  # for the tests that follow


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "verbose")
    with pytest.raises(
        ConfigError, match="HORIZONRL_LOG_LEVEL is 'verbose': set it to info or debug"
    ):
        configure_logs(run="any", role="actor", stream=io.StringIO())
