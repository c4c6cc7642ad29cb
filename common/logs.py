"""Structured logs: one line per event, named in the past tense, with the run, the role and the event's own fields.

They are JSON unless the output is a terminal. The loggers of vLLM, DeepSpeed and nats use the same formatter.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import structlog

from horizonrl.common.errors import ConfigError

LEVEL = "HORIZONRL_LOG_LEVEL"
"""The environment variable that says how much is logged."""
LEVELS = {"info": (logging.INFO, logging.WARNING), "debug": (logging.DEBUG, logging.INFO)}
"""From which level on HorizonRL and the libraries log."""
QUIET = (
    "nats",
    "vllm",
    "DeepSpeed",
    "deepspeed",
    "asyncio",
    "aiohttp.access",
    "transformers",
    "urllib3",
    "torch",
)


def _says_something(record: logging.LogRecord) -> bool:
    """Return False for asyncio's remark on how nats-py ends a connection with TLS: each start of a role has one."""
    return not record.getMessage().startswith("returning true from eof_received() has no effect")


def configure_logs(*, run: str, role: str, stream: TextIO = sys.stderr) -> None:
    """Send every log of this process to `stream`, with `run` and `role` on each line.

    Raises ConfigError for a level that is not one of LEVELS.
    """
    level = os.environ.get(LEVEL, "info")
    if level not in LEVELS:
        raise ConfigError(f"{LEVEL} is {level!r}: set it to {' or '.join(LEVELS)}, or unset it")
    ours, libraries = LEVELS[level]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    terminal = stream.isatty()
    # a plain traceback: structlog's own shows the values of local variables, secrets among them
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    renderer: Any = console if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    # JSON needs the traceback as text; on a terminal the renderer formats it.
    tail = [] if terminal else [structlog.processors.format_exc_info]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail, renderer],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    # `force` removes the root handlers that a library may have installed before.
    logging.basicConfig(handlers=[handler], level=ours, force=True)
    # Libraries say less, so that the log has one line per event of the run.
    for name in QUIET:
        logging.getLogger(name).setLevel(libraries)
    logging.getLogger("asyncio").addFilter(_says_something)
    structlog.contextvars.bind_contextvars(run=run, role=role)


def get_logger() -> Any:
    return structlog.stdlib.get_logger()


def last_lines(path: Path, count: int = 15) -> str:
    """Return the end of a log file; empty if there is none."""
    text = path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""
    return "\n".join(text.splitlines()[-count:])
