"""Keys of a broker: nkeys for the roles, TLS for the server, and the nats-server configuration that trusts them.

The folder is the record: files that exist are kept, missing ones are made, and the configuration is rewritten from
them. So you add a run by naming it, and rotate a key by deleting its file and running the command again.
"""

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import nkeys
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from horizonrl.broker.api import Role
from horizonrl.broker.nats.access import GUESTS, account, answered_often, hears, inbox, publishes
from horizonrl.broker.nats.key_folder import KeyFolder, public_key
from horizonrl.common.errors import ConfigError

AUTHORITY_DAYS = 3_650
SERVER_DAYS = 365
TICKET_KEY_BYTES = 32
RUN_NAME = re.compile(r"[A-Za-z0-9_\-]{1,128}", re.ASCII)
LOOPBACK = ("127.0.0.1", "localhost")
"""Names that every server certificate contains: `horizonrl broker` is its own first client."""

CONFIG = """\
# Written by `horizonrl broker keys` from the seeds in this folder, for a server with JetStream: TLS, and an account for
# each run and for each of its roles. Include it, or: nats-server -c nats-server.conf --jetstream --store_dir DIR
# After a change: --signal reload=PID, and once more for a new run, whose imports nats-server 2.15 takes up only then.
max_payload: 8MB
tls {{
  cert_file: "{folder}/server.pem"
  key_file: "{folder}/server.key"
}}
authorization {{ timeout: 5 }}
accounts {{
{accounts}
}}
"""
ACCOUNT = """\
  "{name}": {{
    may: [
{may}
    ]
    users: [
{users}
    ]
{shared}
  }}"""
USER = "{{ nkey: {public}, permissions: {{ publish: {{ allow: $may }}, subscribe: {{ allow: [{subscribe}] }} }} }}"
ANSWERS = ', response_type: stream, response_threshold: "1m"'
"""For a service that answers a request more than once: answers may come until none has come for this long."""


def make_keys(
    folder: Path,
    runs: Sequence[str],
    hosts: Sequence[str],
    seen_at: Path | None = None,
    actors: int = 1,
) -> list[Path]:
    """Make the missing keys of `runs`, and of a server called `hosts`; return the files that were written.

    `seen_at` is where the server will find the folder, if not here; `actors` is how many actors of each run get keys.
    """
    keys = KeyFolder(folder)
    for run in runs:
        if not RUN_NAME.fullmatch(run):
            raise ConfigError(
                f"{run!r} is no run's name: use letters, digits, _ and -. A pattern cannot be one, because a wildcard "
                "of nats-server stands for a whole token: name each run"
            )
    folder.mkdir(parents=True, exist_ok=True)
    written = _certificates(folder, hosts)
    for run in runs:
        written += _seeds(keys, run, actors)
    text = configuration(keys, seen_at or folder.resolve())
    if not keys.configuration.exists() or keys.configuration.read_text(encoding="utf-8") != text:
        keys.configuration.write_text(text, encoding="utf-8")
        written.append(keys.configuration)
    return written


def configuration(keys: KeyFolder, seen_at: Path) -> str:
    """Return the part of a nats-server's configuration with TLS and the accounts of all runs."""
    accounts = (_account(keys, run, role) for run in keys.runs() for role in Role)
    return CONFIG.format(folder=seen_at, accounts="\n".join(accounts))


def _account(keys: KeyFolder, run: str, role: Role) -> str:
    """Return a role's account. The controller's holds the streams and exports what the other accounts import."""
    may = publishes(run, role)
    if role in GUESTS:
        shared = _lines(
            "imports",
            [*(_import(run, "service", name) for name in may), _import(run, "stream", hears(run))],
        )
    else:
        # Sorted, so that an unchanged folder gives an unchanged file and nobody reloads the server for nothing.
        services = sorted({name for guest in GUESTS for name in publishes(run, guest)})
        exports = [*map(_export, services), f'{{ stream: "{hears(run)}" }}']
        shared = "    jetstream: enabled\n" + _lines("exports", exports)
    return ACCOUNT.format(
        name=account(run, role),
        may=_indent(f'"{name}"' for name in may),
        users=_indent(_user(run, role, path) for path in keys.seeds(run, role)),
        shared=shared,
    )


def _user(run: str, role: Role, seed: Path) -> str:
    public = public_key(seed)
    subscribe = f'"{inbox(run, role, public)}.>", "{hears(run)}"'
    return USER.format(public=public, subscribe=subscribe)


def _import(run: str, kind: str, subject: str) -> str:
    return f'{{ {kind}: {{ account: "{run}", subject: "{subject}" }} }}'


def _export(subject: str) -> str:
    return f'{{ service: "{subject}"{ANSWERS if answered_often(subject) else ""} }}'


def _lines(name: str, items: Iterable[str]) -> str:
    return f"    {name}: [\n{_indent(items)}\n    ]"


def _indent(items: Iterable[str]) -> str:
    return "\n".join(f"      {item}" for item in items)


def _seeds(keys: KeyFolder, run: str, actors: int) -> list[Path]:
    numbers = [
        (role, number) for role in Role for number in range(actors if role is Role.ACTOR else 1)
    ]
    written = []
    for path in (keys.seed(run, role, number) for role, number in numbers):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
            written.append(_write_secret(path, bytes(seed)))
    if not keys.ticket_key(run).exists():
        written.append(
            _write_secret(keys.ticket_key(run), secrets.token_hex(TICKET_KEY_BYTES).encode())
        )
    return written


def _certificates(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """Make the authority and the server's certificate if they are missing, and the latter anew for `hosts`.

    Raises ConfigError, with the folder as it was, if the authority lacks a half that is needed.
    """
    server = [folder / "server.pem", folder / "server.key"]
    authority, signs = (folder / "ca.pem").exists(), (folder / "ca.key").exists()
    if signs and not authority:
        raise ConfigError(
            f"{folder} has a ca.key and no ca.pem: bring it back, or delete ca.key too and give --host"
        )
    # A certificate names its hosts: other hosts, another certificate. And no client trusts one of an authority before.
    if authority and not hosts and all(path.exists() for path in server):
        return []
    if not hosts:
        raise ConfigError(
            "which server? Give every name and address that clients use for it: --host NAME"
        )
    # Clients trust it: a new one in its place would lock all of them out.
    if authority and not signs:
        raise ConfigError(
            f"ca.key is needed for a new certificate: bring it back to {folder}, or delete ca.pem too"
        )
    written = []
    if not authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "HorizonRL broker authority")])
        builder = _builder(name, name, key, AUTHORITY_DAYS).add_extension(
            x509.BasicConstraints(True, 0), critical=True
        )
        written += _write_pair(folder / "ca", key, builder.sign(key, hashes.SHA256()))
    for path in server:
        path.unlink(missing_ok=True)
    return written + _server_certificate(folder, hosts)


def _server_certificate(folder: Path, hosts: Sequence[str]) -> list[Path]:
    authority_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has at most 64 characters. Clients check the alternative names below, which hold every host in full.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    builder = (
        _builder(name, authority.subject, key, SERVER_DAYS)
        .add_extension(
            x509.SubjectAlternativeName([_host(host) for host in (*hosts, *LOOPBACK)]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    return _write_pair(folder / "server", key, builder.sign(authority_key, hashes.SHA256()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(
    stem: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> list[Path]:
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    public = stem.with_suffix(".pem")
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return [_write_secret(stem.with_suffix(".key"), secret), public]


def _write_secret(path: Path, secret: bytes) -> Path:
    """Write a file that nobody else has ever been able to read."""
    # O_EXCL with the mode at creation: a chmod afterwards would leave a moment in which others can open the file.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return path
