"""Changes from version to version, read out of the stream."""

from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.weights.chain import BASE, BYTES, CHANGES, DIGEST, read_changes
from horizonrl.broker.weights.frames import OFFSET, POLICY
from horizonrl.common.state import SentFile
from horizonrl.common.types import PolicyVersion


async def test_no_version_beyond_the_one_asked_for_is_read() -> None:
    transport = MemoryTransport(MemoryServer(), "run")

    async def publish(version: int, data: bytes, offset: int, total: int) -> int:
        headers = {
            BASE: f"v{version - 1}.l0",
            POLICY: f"v{version}.l0",
            BYTES: str(total),
            OFFSET: str(offset),
        }
        name = f"c-{version}-{offset}"
        stored = await transport.publish(
            CHANGES, data, message_id=name, headers=headers | {DIGEST: "0"}
        )
        return stored.sequence

    # The short last chunk is stored first, as after an answer that was lost: many more seem to be missing.
    await publish(1, b"z" * 5, 1000, 1005)
    last = await publish(1, b"y" * 1000, 0, 1005)
    for version in (2, 3):
        await publish(version, b"later", 0, 5)
    sent = SentFile(
        policy=PolicyVersion(version=1), weights_bytes=10_000, digest="0" * 32, last_change=last
    )
    read = [changes async for changes in read_changes(transport, sent, PolicyVersion(version=0), 0)]
    assert [str(changes.policy) for changes in read] == ["v1.l0"]
    assert read[0].data == b"y" * 1000 + b"z" * 5
