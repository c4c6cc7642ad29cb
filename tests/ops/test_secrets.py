"""Secrets come from files and the environment, and show nowhere."""

import asyncio
import io
import logging
import os
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog
from cryptography import x509

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connect
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.signing import TicketSigner
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection, RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.directory import to_toml

SECRET = "hunter2-and-more"
PROGRAM = [sys.executable, "-m", "horizonrl.ops.cli.main"]


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", SECRET)
    return SECRET


@pytest.mark.parametrize("value", [SECRET, "12345678", '"12345678"'])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"nats\.password stands in the command line.*HORIZONRL_BROKER"
    ) as raised:
        RunConfig.load([], [f"--broker.nats.password={value}"])
    assert value.strip('"') not in str(raised.value)


def test_a_secret_in_a_recipe_is_refused_and_not_repeated(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[broker.nats]\npassword = "{SECRET}"')
    with pytest.raises(ConfigError, match=r"broker\.nats\.password stands in a recipe") as raised:
        RunConfig.load([recipe])
    assert SECRET not in str(raised.value)


def test_a_secret_under_a_key_that_is_none_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONRL_BROKER__PASSWORD", SECRET)
    with pytest.raises(ConfigError, match=r"broker\.password: no such key") as raised:
        RunConfig.load()
    assert SECRET not in str(raised.value)


def test_a_secret_in_the_url_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONRL_BROKER__URL", f"nats://me:{SECRET}@host")
    with pytest.raises(ConfigError, match=r"url holds credentials") as raised:
        RunConfig.load()
    assert SECRET not in str(raised.value)


def test_a_secret_of_the_environment_shows_in_no_dump(
    password: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.load()
    assert config.broker.nats.password is not None
    assert config.broker.nats.password.get_secret_value() == password
    assert main(["config"]) == 0
    shown = [
        repr(config),
        str(config),
        to_toml(config),
        config.model_dump_json(),
        capsys.readouterr().out,
    ]
    assert [text for text in shown if password in text] == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_traceback_in_the_log_shows_no_local_variables(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    before = logging.getLogger().handlers[:]
    try:
        configure_logs(run="r", role="test", stream=stream)
        held = "".join(["hunter2", "-and-more"])
        try:
            raise ValueError(f"{len(held)} letters")
        except ValueError:
            get_logger().exception("failed")
    finally:
        logging.getLogger().handlers[:] = before
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    assert "16 letters" in stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("name", ["nats.nkey_seed", "ticket_key"])
def test_a_file_without_a_key_is_named_and_not_shown(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text(SECRET)
    broker = BrokerSection(url="nats://127.0.0.1:9", nats=NatsSection(nkey_seed=tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"broker\.{name} is .*file") as raised:
        asyncio.run(connect("r", broker)) if "nkey" in name else TicketSigner.load(
            "r", tmp_path / "file"
        )
    assert SECRET not in str(raised.value)


def test_keys_are_their_owners_alone_and_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "broker",
        "keys",
        "--out",
        str(tmp_path),
        "--run",
        "one",
        "--host",
        "nats.example",
        "--actors",
        "2",
    ]
    assert main(command) == 0
    keys, printed = KeyFolder(tmp_path), capsys.readouterr().out
    hidden = [*tmp_path.rglob("*.nk"), *tmp_path.rglob("*.key")]
    assert len(hidden) == 8
    for path in hidden:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().strip() not in keys.configuration.read_text() + printed
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_keys(tmp_path, [], []) == []
    rotated = keys.seed("one", Role.ACTOR)
    rotated.unlink()
    assert make_keys(tmp_path, ["one", "two"], [])[0] == rotated
    changed = {path for path, data in before.items() if path.read_bytes() != data}
    assert changed == {rotated, keys.configuration}
    assert keys.runs() == ["one", "two"]


@pytest.mark.parametrize(
    ("missing", "hosts", "refusal"),
    [
        ("ca.key", [], None),
        ("ca.key", ["h"], "ca.key is needed for a new certificate: bring it back"),
        ("ca.key server.key", ["h"], "ca.key is needed for a new certificate: bring it back"),
        ("ca.pem", ["h"], "a ca.key and no ca.pem: bring it back"),
        ("ca.pem ca.key", [], "which server"),
        ("ca.pem ca.key", ["h"], None),
        ("server.key", [], "which server"),
        ("server.key", ["h"], None),
        ("server.pem", ["h"], None),
    ],
)
def test_an_authority_that_clients_trust_is_never_replaced_unasked(
    missing: str, hosts: list[str], refusal: str | None, tmp_path: Path
) -> None:
    make_keys(tmp_path, ["r"], ["h"])
    for name in missing.split():
        (tmp_path / name).unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if refusal is not None:
        with pytest.raises(ConfigError, match=refusal):
            make_keys(tmp_path, ["r"], hosts, actors=2)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return
    make_keys(tmp_path, ["r"], hosts, actors=2)
    assert (before.get(tmp_path / "ca.pem") == (tmp_path / "ca.pem").read_bytes()) == (
        "ca.pem" not in missing
    )
    assert (tmp_path / "ca.key").exists() == (missing != "ca.key")
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The two belong together.
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")


def test_a_run_that_is_a_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a\*' is no run's name"):
        make_keys(tmp_path, ["a*"], ["h"])


@pytest.mark.process
def test_a_role_shows_its_secrets_in_no_process_list_log_or_run_directory(tmp_path: Path) -> None:
    """A controller that waits for its broker, and then fails, with every kind of secret at hand."""
    make_keys(tmp_path / "keys", ["run"], ["localhost"])
    keys = KeyFolder(tmp_path / "keys")
    seed = keys.seed("run", Role.CONTROLLER)
    given = {"nats.user": "me", "nats.nkey_seed": seed, "ticket_key": keys.ticket_key("run")}
    options = [f"--broker.{name}={value}" for name, value in given.items()]
    options += [
        "--run.name=run",
        f"--run.root={tmp_path}",
        "--broker.url=nats://127.0.0.1:9",
        "--metrics.port=0",
    ]
    environment = os.environ | {"HORIZONRL_BROKER__NATS__PASSWORD": SECRET}
    secrets = [
        SECRET,
        *(path.read_text() for path in tmp_path.glob("keys/run/**/*") if path.is_file()),
    ]
    with subprocess.Popen(
        [*PROGRAM, "controller", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as role:
        time.sleep(0.5)
        shown = Path(f"/proc/{role.pid}/cmdline").read_text()
        printed = role.communicate(timeout=60)[0]
    assert role.returncode == 1
    assert "error: no nats-server with JetStream answers at nats://127.0.0.1:9" in printed
    assert "Traceback" not in printed
    kept = "".join(path.read_text() for path in tmp_path.glob("run/**/*") if path.is_file())
    assert [secret for secret in secrets if secret in shown + printed + kept] == []
