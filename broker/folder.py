"""The folder of a broker's keys: where `horizonrl broker keys` writes and `horizonrl broker` reads."""

from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.access import Role

TICKET_KEY = "ticket.key"


@dataclass(frozen=True, slots=True)
class Keys:
    """Where things are: `{run}/{role}.nk`, `{run}/ticket.key`, `ca.pem`, `server.pem`, `nats-server.conf`."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def configuration(self) -> Path:
        return self.folder / "nats-server.conf"

    def seed(self, run: str, role: Role) -> Path:
        return self.folder / run / f"{role.value}.nk"

    def ticket_key(self, run: str) -> Path:
        return self.folder / run / TICKET_KEY

    def runs(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob(f"*/{TICKET_KEY}"))
