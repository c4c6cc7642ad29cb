"""What only NATS has: how a client proves who it is, and how a server of our own keeps its files."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from horizonrl.common.config.section import Section


class NatsSection(Section):
    user: str | None = None
    """A user of the server; the password is in HORIZONRL_BROKER__NATS__PASSWORD."""
    password: SecretStr | None = None
    """The user's password. Set it only in the environment: HORIZONRL_BROKER__NATS__PASSWORD."""
    credentials: Path | None = None
    """A NATS .creds file (JWT and nkey)."""
    nkey_seed: Path | None = None
    """A file with an nkey seed, one of those that `horizonrl broker keys` writes."""
    ca_file: Path | None = None
    """Certificate authority of a TLS server. If it is set, a server without TLS is refused."""
    domain: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]+$")
    """JetStream domain of the broker, for a role whose `url` is a leaf node of it. If the leaf node has a mirror of the
    run's weights stream, the role reads weights from there. None for a role that connects to the broker itself."""
    keys: Path | None = None
    """The folder of `horizonrl broker keys` that `horizonrl broker` serves with. No other role reads it."""
    durability: Literal["process", "power"] = "process"
    """What an acknowledged message survives: the server's death (`process`), or also a power cut (`power`, at the price
    of one fsync per message). Servers that `train` and `horizonrl broker` start obey it. For any other server, leave it
    out and put `sync_interval: always` into the section `jetstream` of the server's configuration."""
    replicas: Literal[1, 3, 5] | None = None
    """Number of servers of a cluster that hold a copy of each stream and key: with 3, the run survives the loss of any
    one server. None leaves existing streams as they are, and gives new ones a single copy."""


def refuse_moved_keys(broker: dict[str, Any]) -> dict[str, Any]:
    """Return the section `[broker]` without keys that are now in `[broker.nats]`; raise ValueError if one is set.

    The config.toml of a run before 0.1.0 lists every key. A key with its default is passed over there, so that the run
    stays readable. This function goes with 0.2.0.
    """
    moved = NatsSection.model_fields.keys() & broker.keys()
    for name in sorted(moved):
        if broker[name] not in (None, "none", NatsSection.model_fields[name].default):
            variable = ": set HORIZONRL_BROKER__NATS__PASSWORD" if name == "password" else ""
            raise ValueError(f"broker.{name} is now broker.nats.{name}{variable}")
    return {name: value for name, value in broker.items() if name not in moved}
