"""`horizonrl status`: where a run stands, from its directory, its broker, or both; once, live, or as JSON."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.live import Live

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import BrokerUnreachable, ConfigError
from horizonrl.common.logs import configure_logs
from horizonrl.common.run_dir import LOGS
from horizonrl.ops.observe.screen import as_json, plain_line, screen
from horizonrl.ops.rundir.broker_status import BrokerStatus, Observer
from horizonrl.ops.rundir.directory import (
    SECRETS,
    check_broker_named,
    in_training,
    read_address,
    read_config,
)
from horizonrl.ops.rundir.files import JournalReader
from horizonrl.ops.rundir.troubles import Trouble, TroubleReader, collect
from horizonrl.ops.rundir.view import RunView
from horizonrl.ops.terminal.console import plain_console

REFRESH_S = 2.0
PATIENCE_S = 2.0
"""How long the broker of a run directory may take to answer: it is gone when the run is over."""
LOOK_S = 10.0
"""And how long, once it has answered, to tell where the run is: it may die meanwhile."""


@dataclass(frozen=True)
class StatusRequest:
    """The command line."""

    places: Sequence[Path] = ()
    """A run directory, or the recipes of a run on the broker that is named."""
    run: str | None = None
    overrides: Sequence[str] = ()
    watch: bool = False
    as_json: bool = False


@dataclass
class StatusSource:
    """Where a run is read from: its broker, and its directory if that is here."""

    config: RunConfig
    run_dir: Path | None
    described: bool
    """The config is the run's own, and not one of defaults."""
    overrides: Sequence[str] = ()
    _troubles: list[Trouble] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            self._journal = JournalReader(self.run_dir)
            self._logs = TroubleReader(self.run_dir / LOGS)

    @classmethod
    def find(cls, request: StatusRequest) -> "StatusSource":
        """Raises ConfigError when nothing says which run is meant."""
        if len(request.places) == 1 and not request.places[0].is_file():
            run_dir = request.places[0]
            return cls(
                _find_config(run_dir, request.overrides),
                run_dir,
                described=True,
                overrides=request.overrides,
            )
        named = [f"--run.name={request.run}"] if request.run else []
        config = RunConfig.load(request.places, [*named, *request.overrides])
        # The default name would show another run's state, or none at all.
        is_named = (
            request.run
            or request.places
            or any(token.startswith("--run.name") for token in request.overrides)
        )
        if not is_named or config.broker.url is None:
            raise ConfigError(
                "which run? Give its directory, or --broker.url nats://HOST:PORT --run NAME"
            )
        return cls(config, None, described=bool(request.places))

    async def look(self) -> RunView:
        """Return where the run stands. Raises BrokerUnreachable where there is only a broker, which is silent.

        Whenever `train` is started its embedded broker may have another port, and the run other steps.
        """
        if self.run_dir is not None:
            self.config = _find_config(self.run_dir, self.overrides)
        try:
            broker = await self._look_at_broker()
        except BrokerUnreachable:
            if self.run_dir is None:
                raise
            broker = None
        if self.run_dir is None:
            return RunView(
                self.config.run.name, self.config if self.described else None, broker=broker
            )
        self._troubles = collect(self._logs.events(), self._troubles)
        view = RunView.read(self.run_dir, self.config, self._journal.read())
        return replace(view, broker=broker, troubles=tuple(self._troubles))

    async def _look_at_broker(self) -> BrokerStatus | None:
        """Ask the broker. Raises BrokerUnreachable also when it dies meanwhile: a request is repeated for ever."""
        if self.config.broker.url is None or self._broker_is_gone():
            return None
        wait_s = PATIENCE_S if self.run_dir else None
        run, broker = self.config.run.name, self.config.broker
        async with connected(run, broker, Role.MONITOR, wait_s=wait_s) as transport:
            try:
                # A run directory has something to show without its broker; a bare broker address has not, and waits.
                async with asyncio.timeout(LOOK_S if self.run_dir else None):
                    return await Observer(transport).look()
            except TimeoutError:
                raise BrokerUnreachable(
                    f"{broker.url} has not answered for {LOOK_S:.0f} s"
                ) from None

    def _broker_is_gone(self) -> bool:
        """Return whether the directory's own broker has ended with its `train`: there is nobody to wait for."""
        if (
            self.run_dir is None
            or self.config.broker.url != read_address(self.run_dir)
            or in_training(self.run_dir)
        ):
            return False
        port = urlsplit(self.config.broker.url or "").port
        with socket.socket() as probe:
            return port is not None and probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def _find_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """Return a run directory's config with its broker's address."""
    config = read_config(run_dir, overrides)
    check_broker_named(config, run_dir, overrides)
    if config.broker.url is None:
        # The broker of a `train` on this machine asks for no secret, and its address is the directory's too.
        nats = config.broker.nats.model_copy(update=dict.fromkeys(SECRETS))
        broker = config.broker.model_copy(update={"url": read_address(run_dir), "nats": nats})
        return config.model_copy(update={"broker": broker})
    return config


def show_status(request: StatusRequest) -> int:
    """Print where a run stands: once, or again and again until Ctrl-C."""
    source = StatusSource.find(request)
    with Path(os.devnull).open(
        "w", encoding="utf-8"
    ) as nowhere:  # what fails is raised; a log would be drawn over
        configure_logs(run=source.config.run.name, role="status", stream=nowhere)
        if not request.watch:
            _print(asyncio.run(source.look()), request.as_json)
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            _watch(source, request.as_json)
    return 0


def _print(view: RunView, is_json: bool) -> None:
    if is_json:
        print(json.dumps(as_json(view)), flush=True)
    else:
        plain_console().print(screen(view), highlight=False)


def _watch(source: StatusSource, is_json: bool) -> None:
    """Redraw on a terminal; elsewhere print a JSON line each time, or a plain line whenever it says something new."""
    if sys.stdout.isatty() and not is_json:
        with Live(console=plain_console(), auto_refresh=False, screen=True) as live:
            while True:
                live.update(screen(asyncio.run(source.look())), refresh=True)
                time.sleep(REFRESH_S)
    # Each look has an event loop and a connection of its own: a broker that ends in between is no special case.
    printed = ""
    while True:
        view = asyncio.run(source.look())
        if is_json:
            _print(view, is_json)
        elif (line := plain_line(view)) != printed:
            print(line, flush=True)
            printed = line
        time.sleep(REFRESH_S)
