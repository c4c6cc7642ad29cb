"""What only NATS has: how a client proves who it is, and how a server of our own keeps its files."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from horizonrl.common.config.section import Section


class NatsSection(Section):
    user: str | None = None
    """User of the server; the password comes from HORIZONRL_BROKER__NATS__PASSWORD."""
    password: SecretStr | None = None
    """Password of the user. Set it only as HORIZONRL_BROKER__NATS__PASSWORD."""
    nkey_seed: Path | None = None
    """File with an nkey seed, as `horizonrl broker keys` writes it, or with a JWT as well (NATS .creds)."""
    ca_file: Path | None = None
    """Certificate authority of a TLS server. With it, a server without TLS is refused."""
    domain: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]+$")
    """JetStream domain of the broker, for a role that connects to a leaf node and reads weights from its mirror. None
    for a direct connection."""
    durability: Literal["process", "power"] = "process"
    """What an acknowledged message survives: the server's death, or also a power cut (one fsync per message). It
    applies to servers that HorizonRL starts; on others, set `sync_interval: always`."""
    replicas: Literal[1, 3, 5] | None = None
    """Servers that hold each stream and key; with 3, the run survives the loss of one. None keeps existing streams and
    gives new ones one copy."""
