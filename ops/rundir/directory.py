"""Reading a run directory: its config, its journal, its broker's address, and who works in it."""

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import tomli_w

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.section import Own
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.locks import take_lock
from horizonrl.common.run_dir import ADDRESS, CONFIG, TRAIN_LOCK
from horizonrl.ops.models.models import hub_id

INHERITED_LOCK = "HORIZONRL_TRAIN_LOCK"
"""Environment variable of a `horizonrl train`: the descriptor of its run directory's lock, which its starter took."""
_ADDRESS = re.compile(r"""([A-Za-z][\w+.-]*)://[^\s/"',;?#]+([^\s"',;?#]*)[^\s"',;]*""")
"""Scheme, what is hidden, path, and what is left out: a query may hold a key."""
_FOLDER = re.compile(r"""(?<![^\s=:"'(])(~[\w.-]*|file://)?/(?:[^\s/:"',;]+/)+""")
"""The folder of a path within a text, such as a word of a shell's command."""
SECRETS = ("password", "nkey_seed")
"""The keys of `[broker.nats]` that prove who an operator is."""
URL_OPTION, URL_VARIABLE = "--broker.url", "HORIZONRL_BROKER__URL"
TRIES = 10
"""How often the lock is tried, 10 ms apart: whoever only looks whether it is held (`in_training`) holds it briefly."""


def to_toml(config: RunConfig) -> str:
    """Return the resolved config, without secrets, as a recipe for the same run."""
    sections: dict[str, Any] = config.model_dump(
        mode="json", exclude={"broker": {"nats": {"password"}}}
    )
    for section in (*sections.values(), sections["broker"]["nats"]):
        if isinstance(section, dict):
            # TOML has no null, so the config reads the word "none" as None.
            section.update({key: "none" for key, value in section.items() if value is None})
    return tomli_w.dumps(_without_nones(sections))


def _without_nones(value: Any) -> Any:
    """Return a value without the keys that are None: an environment's options and vLLM's know no word for it."""
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, list) else value


def _change_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return a value with every text in it changed, at any depth."""
    if isinstance(value, dict):
        return {key: _change_texts(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_change_texts(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


def public_config(config: RunConfig) -> dict[str, Any]:
    """Return the part of a config that may be published, a valid recipe: no broker, no path or address of a machine."""
    shown: dict[str, Any] = config.model_dump(mode="json", exclude={"broker", "metrics", "tracker"})
    shown["run"].pop("root")
    shown["model"]["name"] = model_label(config)
    for env in shown["envs"]:
        env["options"] = _change_texts(_hide_location, env["options"])
    for section, key in (
        ("actor", "gateway_host"),
        ("learner", "node_rank"),
    ):
        shown[section].pop(key)
    for section, key in (("actor", "vllm"), ("learner", "deepspeed")):
        shown[section][key] = _change_texts(_hide_location, shown[section][key])
    for name, section in config:
        if isinstance(section, Own):
            shown[name] |= _change_texts(_hide_location, dict(section.options))
    if config.learner.rendezvous is not None:  # several machines need one
        shown["learner"]["rendezvous"] = "machine-0:29400"
    return shown


def model_label(config: RunConfig) -> str:
    """Return what a person calls the run's model: its id on the hub, or the name of its directory."""
    model_dir = Path(config.model.name)
    return hub_id(model_dir) or model_dir.name


def _hide_location(text: str) -> str:
    """Return a text without the folders of its paths and the hosts of its addresses."""
    if Path(text).is_absolute():
        return Path(text).name
    return _FOLDER.sub("", _ADDRESS.sub(lambda match: f"{match[1]}://host{match[2]}", text))


def write_config(config: RunConfig) -> Path:
    """Write the run's config into its directory and return the path."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    path = config.run_dir / CONFIG
    envs = [
        env.model_copy(update={"options": _change_texts(_complete_path, env.options)})
        for env in config.envs
    ]
    path.write_text(to_toml(config.model_copy(update={"envs": tuple(envs)})), encoding="utf-8")
    return path


def _complete_path(text: str) -> str:
    """Return the whole path of the file that a text names, also of `file.py:function`; any other text as it is.

    Whoever reads what a run has recorded may stand in another folder.
    """
    file, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    # A word without a suffix or a folder may be a command, or the name of anything.
    is_named = "." in file or "/" in file
    return (
        f"{Path(file).absolute()}{colon}{function}" if is_named and os.path.isfile(file) else text
    )


def read_address(run_dir: Path) -> str | None:
    """Return the url of the run's latest embedded broker, or None where it never had one."""
    file = run_dir / ADDRESS
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def check_broker_named(config: RunConfig, run_dir: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if secrets would go to a broker that a run directory names and the operator does not.

    Whoever made the directory chose that address: a password, or a signature of what is sent there, would be theirs.
    """
    secrets = [name for name in SECRETS if getattr(config.broker.nats, name) is not None]
    is_named = URL_VARIABLE in os.environ or any(
        word.partition("=")[0] == URL_OPTION for word in overrides
    )
    if config.broker.url is not None and secrets and not is_named:
        raise ConfigError(
            f"{run_dir / CONFIG} names the broker {config.broker.url}, which would be shown your broker.nats."
            f"{' and broker.nats.'.join(secrets)}: if it is your broker, add {URL_OPTION}={config.broker.url}"
        )


@contextmanager
def only_train(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for one `horizonrl train`. Raises RunFailed with the process that holds it already."""
    with train_lock(run_dir) as file:
        note_holder(file, os.getpid())
        try:
            yield
        finally:
            # The file stays: a lock belongs to the inode, and a removed file would let two processes hold "the" lock.
            file.truncate(0)


@contextmanager
def train_lock(run_dir: Path) -> Iterator[IO[str]]:
    """Lock a run directory for this process, and for a `horizonrl train` that gets the file as INHERITED_LOCK.

    Raises RunFailed with the process that holds it already.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    inherited = os.environ.pop(INHERITED_LOCK, None)
    # Not "w", which would erase the process id of the `train` that holds the lock.
    with (
        os.fdopen(int(inherited), "a+")
        if inherited
        else (run_dir / TRAIN_LOCK).open("a+", encoding="utf-8") as file
    ):
        for _ in range(TRIES):
            if take_lock(file):
                break
            time.sleep(0.01)
        else:
            raise RunFailed(
                f"another `horizonrl train` (process {_holder(run_dir)}) works in {run_dir}: "
                f"`horizonrl status {shlex.quote(str(run_dir))}` shows it. End it, or give this run another run.name"
            )
        # The parts of a run must not hold the lock after their `train`
        os.set_inheritable(file.fileno(), False)
        yield file


def note_holder(lock: IO[str], process: int) -> None:
    """Write down which process holds a run directory."""
    lock.truncate(0)
    lock.write(str(process))
    lock.flush()


def in_training(run_dir: Path) -> bool:
    """Return whether a `train` works in the directory; if so, a broker that is away will come back."""
    try:
        # Not by the process id in it, which may be another machine's or container's, or another program's by now.
        with (run_dir / TRAIN_LOCK).open() as file:
            return not take_lock(file, shared=True)
    except OSError:  # there is none, or it lies where no `train` could lock it
        return False


def _holder(run_dir: Path) -> int | None:
    file = run_dir / TRAIN_LOCK
    process = file.read_text(encoding="utf-8") if file.exists() else ""
    return int(process) if process.isdecimal() else None


def read_config(run_dir: Path, overrides: Sequence[str] = (), *, besides: str = "") -> RunConfig:
    """Read a run directory's config as it was recorded, with overrides. Raises ConfigError when there is none.

    `besides` is what else the directory lacks, where a command takes others than runs too.
    """
    if not (run_dir / CONFIG).is_file():
        if in_training(run_dir):
            raise ConfigError(
                f"{run_dir} is still starting: it holds no {CONFIG} yet. Try again in some seconds"
            )
        meant = Path("runs") / run_dir.name
        hint = f"; did you mean {meant}?" if (meant / CONFIG).is_file() else ""
        raise ConfigError(f"{run_dir} is no run directory: it holds no {CONFIG}{besides}{hint}")
    return RunConfig.load([run_dir / CONFIG], overrides, recorded=True)
