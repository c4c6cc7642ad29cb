"""The folder of a broker's keys: where `horizonrl broker keys` writes and `horizonrl broker` reads."""

import os
from dataclasses import dataclass
from pathlib import Path

import nkeys

from horizonrl.broker.api import Role
from horizonrl.common.config.schema import BrokerSection

TICKET_KEY = "ticket.key"


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """The folder's layout: `{run}/{role}.nk`, `{run}/actors/actor-{number}.nk`, `{run}/ticket.key`, `ca.pem`,
    `server.pem`, `nats-server.conf`."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def configuration(self) -> Path:
        return self.folder / "nats-server.conf"

    def included(self, folder: Path) -> str:
        """Return the line that includes this configuration in that of a server in `folder`: nats-server wants a
        relative path."""
        return f'include "{os.path.relpath(self.configuration.resolve(), folder.resolve())}"'

    def seed(self, run: str, role: Role, number: int = 0) -> Path:
        """Return the file of a role's key. Each actor has its own, by `number`."""
        if role is Role.ACTOR:
            return self.folder / run / "actors" / f"actor-{number}.nk"
        return self.folder / run / f"{role.value}.nk"

    def seeds(self, run: str, role: Role) -> list[Path]:
        """Return the files of a role's keys that exist."""
        pattern = "actors/actor-*.nk" if role is Role.ACTOR else f"{role.value}.nk"
        return sorted((self.folder / run).glob(pattern))

    def ticket_key(self, run: str) -> Path:
        return self.folder / run / TICKET_KEY

    def runs(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob(f"*/{TICKET_KEY}"))


def as_role(broker: BrokerSection, run: str, role: Role) -> BrokerSection:
    """Return the section with the files of a run's role, if the folder that `nkey_seed` is from has them."""
    if broker.nats.nkey_seed is None:
        return broker
    keys = KeyFolder(broker.nats.nkey_seed.parent.parent)
    if not keys.seed(run, role).is_file():
        return broker
    nats = broker.nats.model_copy(update={"nkey_seed": keys.seed(run, role)})
    # Without a key no ticket of the run is signed.
    ticket_key = broker.ticket_key and keys.ticket_key(run)
    return broker.model_copy(update={"nats": nats, "ticket_key": ticket_key})


def public_key(seed: Path) -> str:
    """Return the public nkey of a file's seed. Raises ValueError if the file has none, without the file's content."""
    try:
        pair = nkeys.from_seed(bytearray(seed.read_bytes().strip()))
    except (nkeys.NkeysError, ValueError):
        raise ValueError(f"{seed} holds no nkey seed") from None
    public: bytes = pair.public_key
    pair.wipe()
    return public.decode()
