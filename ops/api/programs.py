"""Commands of HorizonRL as processes of a program that uses the API."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, get_args

from horizonrl.common.config.arguments import checked
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, HorizonError, RunFailed
from horizonrl.common.processes import detached, horizonrl_command
from horizonrl.common.run_dir import LOGS
from horizonrl.ops.rundir.directory import INHERITED_LOCK, to_toml
from horizonrl.ops.rundir.variables import recipe_environment

Role = Literal["broker", "controller", "learner", "actor"]
STOP_S = 180.0
"""Shortest deadline of a program that was asked to end."""
SPARE_S = 55.0
"""Of that deadline, what is left when the last part of the program has ended or was killed."""
LAST_LINES = 15


@dataclass
class RunningCommand:
    """A command in a process of its own, which ends with the process that started it.

    Linux ends it with the *thread* that started it: start it in the main thread, or in one that lasts.
    """

    command: str
    output: Path
    """The file that it writes to, after what is there already."""
    process: "subprocess.Popen[bytes]" = field(repr=False)
    _begin: int
    _stop_within_s: float = STOP_S
    _stopped: bool = False

    @classmethod
    def start(
        cls,
        words: Sequence[str],
        output: Path,
        config: RunConfig | None = None,
        lock: IO[str] | None = None,
    ) -> "RunningCommand":
        """Start `horizonrl WORDS`, with a recipe of `config` as the last word; it writes to the file `output`.

        The recipe stays beside `output`, so that the same command can be given again. `lock` is the file of a
        `train_lock`, which the command takes over.
        """
        environment, stop_within_s = dict(os.environ), STOP_S
        output.parent.mkdir(parents=True, exist_ok=True)
        if config is not None:
            recipe = output.with_suffix(".toml")
            recipe.touch(mode=0o600)
            recipe.write_text(to_toml(config), encoding="utf-8")
            words, environment = [*words, str(recipe)], recipe_environment(config)
            stop_within_s = longest_stop_s(config)
        if lock is not None:
            environment[INHERITED_LOCK] = str(lock.fileno())
        with output.open("ab") as sink:
            process = subprocess.Popen(
                horizonrl_command(*words),
                env=environment,
                pass_fds=() if lock is None else (lock.fileno(),),
                **detached(sink),
            )
            return cls(words[0], output, process, sink.tell(), stop_within_s)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """What it has written so far."""
        with self.output.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended. Raises RunFailed or ConfigError with its message if it failed.

        Raises TimeoutError if it still runs after `timeout_s`; None waits for ever.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"`horizonrl {self.command}` still runs after {timeout_s:g} s"
            ) from None
        # 130 and 143: ended by the signal of `stop`, as it should.
        if code and not (self._stopped and code in (130, 143)):
            raise self._failure(code)

    def stop(self) -> None:
        """Ask it to end, wait until it has, and kill it after a deadline that leaves its parts theirs.

        A program that has ended is left alone.
        """
        if self.running:
            self._stopped = True
            self.process.terminate()
            try:
                self.process.wait(self._stop_within_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise RunFailed(
                    f"`horizonrl {self.command}` did not end within {self._stop_within_s:g} s and was killed: see "
                    f"{self.output}"
                ) from None

    def _failure(self, code: int) -> HorizonError:
        _, separator, message = f"\n{self.said}".rpartition("\nerror: ")
        if not separator:
            last = "\n".join(self.said.splitlines()[-LAST_LINES:])
            message = f"`horizonrl {self.command}` ended with code {code}; the end of {self.output}:\n{last}"
        kind = ConfigError if code == ConfigError.exit_code else RunFailed
        return kind(message.strip())


@checked
def start_role(role: Role, config: RunConfig, name: str | None = None) -> RunningCommand:
    """Start one role in a process of its own, as `horizonrl ROLE` does; it logs to `logs/NAME.log` of the run.

    `config.broker.url` says where the broker is. Give several actors of one run directory a `name` each.
    """
    return RunningCommand.start([role], config.run_dir / LOGS / f"{name or role}.log", config)


def longest_stop_s(config: RunConfig) -> float:
    """Return how long a program of this config may take to end: each role has a deadline in the config."""
    # With the HTTP server that roles have.
    from horizonrl.ops.launch.roles import KILL_S, stop_within_s

    return max(
        STOP_S, max(stop_within_s(role, config) for role in get_args(Role)) + KILL_S + SPARE_S
    )
