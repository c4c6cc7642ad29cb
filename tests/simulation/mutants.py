"""Mutants of the protocol: one line each that is wrong on purpose. The simulation has to tell each from the real code.

A mutant runs in a process of its own, where its file is read with the line replaced.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REAL_S = 300.0
"""A mutant that has not ended by then goes round in circles, which counts as killed."""


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    why: str
    equivalent: str = ""
    """Why no run can tell it from the real code."""


ACTOR, LEASES, GROUPS, TICKETS = (
    "actors/loop.py",
    "broker/leases.py",
    "broker/groups.py",
    "broker/tickets.py",
)
STANDING, AUDIT, CONTROLLER = (
    "broker/open_tickets.py",
    "learner/controller/audit.py",
    "learner/controller/loop.py",
)
COLLECTOR, WAITING, ACCOUNTS = (
    "learner/intake/collector.py",
    "learner/intake/waiting.py",
    "learner/intake/accounts.py",
)
STATE, RECOVERY, FENCE, LOOP = (
    "learner/loop/state.py",
    "learner/loop/recovery.py",
    "learner/loop/fence.py",
    "learner/loop/loop.py",
)
INTAKE, SPACE, PUBLICATION = (
    "learner/loop/log_intake.py",
    "learner/loop/log_space.py",
    "learner/loop/publication.py",
)

MUTANTS = (
    # ---- the actor
    Mutant(
        ACTOR,
        "await self._publish(group)\n                    await self._acknowledge(lease)",
        "await self._acknowledge(lease)\n                    await self._publish(group)",
        "a crash between the two loses the group",
    ),
    Mutant(
        ACTOR,
        'await self._give_back(lease, "broken", RETRY_DELAY_S)',
        "await self._acknowledge(lease)",
        "a broken group ends its ticket without an end in the log",
    ),
    Mutant(
        ACTOR,
        "if lease.deliveries > self.settings.max_deliver:",
        "if False:",
        "a ticket whose actors die is played for ever",
    ),
    Mutant(
        ACTOR,
        "if lease.deliveries >= self.settings.max_deliver:",
        "if False:",
        "a hopeless task is played once more than it may be, and by then given up without a reason",
    ),
    Mutant(
        ACTOR,
        "if len(group.valid_episodes) >= min(2, ticket.group_size):",
        "if group.episodes:",
        "a group without a baseline is published",
    ),
    Mutant(ACTOR, "self._freed.set()", "pass", "whoever waits for slots is not woken"),
    Mutant(
        ACTOR,
        "            self._free += lease.ticket.group_size\n",
        "",
        "slots are never free again",
    ),
    Mutant(
        ACTOR,
        "self._free -= lease.ticket.group_size",
        "pass",
        "more episodes than slots",
    ),
    Mutant(
        ACTOR,
        "await until_stopped(self._room(), self.stopping)",
        "pass",
        "tickets are taken without a slot",
    ),
    Mutant(
        ACTOR,
        "        except LeaseLost as error:\n            self.metrics",
        "        except ZeroDivisionError as error:\n            self.metrics",
        "a lost lease ends the actor",
    ),
    Mutant(
        ACTOR,
        "await self.follower.reached(ticket.issued_at_version, WEIGHTS_WAIT_S)",
        "pass",
        "an actor begins before it has the weights that the ticket names",
    ),
    Mutant(
        "actors/weights/follower.py",
        "return (self._policy.version, self._digest) == (manifest.policy, manifest.digest)",
        "return self._policy.version.version >= manifest.policy.version",
        "weights of a lineage that was rolled back stay",
    ),
    Mutant(
        "actors/weights/follower.py",
        "            self._news.set()\n",
        "",
        "announced weights are never applied",
    ),
    Mutant(
        "actors/rollout/rollout.py",
        "self.ids += generation.ids + answer_ids",
        "self.ids += generation.ids",
        "what the episode says was read is not what was read",
    ),
    Mutant(
        "actors/engines/scripted.py",
        "versions.append(self._version)",
        "versions.append(PolicyVersion(version=self._version.version))",
        "tokens are named after another lineage",
    ),
    # ---- leases
    Mutant(
        LEASES,
        "asked + self.ack_wait_s / 3 - loop.time()",
        "asked + self.ack_wait_s * 2 - loop.time()",
        "a living actor loses its lease",
    ),
    Mutant(
        LEASES,
        "                move(asked + self.ack_wait_s)\n",
        "",
        "a group that takes longer than one lease is given up",
    ),
    Mutant(
        LEASES,
        "        heartbeat = asyncio.create_task(self._extend(deadline))",
        "        heartbeat = asyncio.create_task(asyncio.sleep(0))",
        "nobody extends the lease",
    ),
    # ---- the group log
    Mutant(
        GROUPS,
        "await self._transport.publish(subject, data, message_id=message_id),",
        "await self._transport.publish(subject, data),",
        "an end has no id: its repeat is stored",
    ),
    Mutant(
        GROUPS,
        'message_id=f"{_upload(end_id, digest)}{index}{repeat}"',
        'message_id=f"{end_id}.{index}{repeat}"',
        "parts of two actors' groups share their ids",
    ),
    Mutant(
        GROUPS,
        "                    floor = first\n",
        "                    pass\n",
        "a purge takes the parts of a group that is joined later",
    ),
    Mutant(
        GROUPS,
        "if message.sequence >= before:",
        "if message.sequence > first:",
        "only the first part of a group is read",
    ),
    # ---- tickets and their controller
    Mutant(
        TICKETS,
        "ticket_subject(ticket.kind), data, message_id=ticket.ticket_id",
        "ticket_subject(ticket.kind), data",
        "a ticket has no id: its repeat is stored",
    ),
    Mutant(
        TICKETS,
        "self._issued[kind] = highest + 1",
        "self._issued[kind] = highest + 2",
        "a controller that starts leaves a number out",
    ),
    Mutant(
        TICKETS,
        "number for number in range(lowest, highest) if number not in latest",
        "number for number in () if number not in latest",
        "the numbers that a dead controller left out are never issued",
        "the audit finds them one `ack_wait_s` later (`OpenTickets._absent`)",
    ),
    Mutant(
        CONTROLLER,
        "progress.settled(kind) + limit, progress, issued)",
        "progress.settled(kind) + limit + 1, progress, issued)",
        "a ticket without credit",
    ),
    Mutant(
        CONTROLLER,
        "progress.settled(kind) + limit, progress, issued)",
        "progress.settled(kind) + limit - 1, progress, issued)",
        "a ticket too few: the last step is never full",
    ),
    Mutant(
        CONTROLLER,
        "start = max(issued[kind], await self._queue.count_issued(kind))",
        "start = issued[kind]",
        "what another controller has issued is issued again",
        "its id makes a second copy harmless while the broker remembers it, and the fence ends this controller",
    ),
    Mutant(
        CONTROLLER,
        "        await self._fence.check()\n        for ticket, stored in zip",
        "        for ticket, stored in zip",
        "a controller that was replaced goes on to issue",
    ),
    Mutant(
        CONTROLLER,
        "await self._fence.take_over()",
        "pass",
        "actors wait for the run's settings for ever",
    ),
    Mutant(
        CONTROLLER,
        "if progress.finished:\n                continue",
        "if True:\n                continue",
        "no ticket is ever issued",
    ),
    Mutant(
        CONTROLLER,
        "log_end = await self._log.end() if gone else 0",
        "log_end = 0",
        "a ticket whose group is in the log, unread, counts as lost",
    ),
    Mutant(
        CONTROLLER,
        "return len(self.eval_tasks) - number % len(self.eval_tasks)",
        "return 1",
        "one eval ticket at a time",
        "the loop around it asks again until the round is complete",
    ),
    Mutant(
        CONTROLLER,
        "return self.schedule.eval_step(round_number) <= step",
        "return self.schedule.eval_step(round_number) < step",
        "an evaluation begins a version late, and the last one never",
    ),
    Mutant(
        AUDIT,
        "if progress.cursor >= end}",
        "if True}",
        "a ticket whose group has not been read counts as lost",
    ),
    Mutant(
        STANDING,
        "most = last + 1 if subject == REISSUED else last",
        "most = last + 1",
        "the last ticket of a kind is removed, and a controller that starts counts from 0",
    ),
    Mutant(
        STANDING,
        "            first.setdefault(subject, sequence)\n",
        "",
        "tickets are removed that have not ended",
    ),
    # ---- the learner: what a step is made of
    Mutant(
        COLLECTOR,
        "return position.version - group.oldest_version > self.rules.max_staleness",
        "return position.version - group.oldest_version > self.rules.max_staleness + 1",
        "a group that is too old is trained",
        "under `wait` none comes too late, and under `drop` credit leaves few that do",
    ),
    Mutant(
        COLLECTOR,
        "return position.version - group.oldest_version > self.rules.max_staleness",
        "return position.version - group.oldest_version >= self.rules.max_staleness",
        "a group that is just fresh enough is dropped",
    ),
    Mutant(
        COLLECTOR,
        "if group.newest_version > position.version:  # of",
        "if False:  # of",
        "a group of a future that was rolled back is trained",
    ),
    Mutant(
        COLLECTOR,
        "                self.pending.repeats += 1\n                return None\n            ",
        "                self.pending.repeats += 1\n            ",
        "a repeated group is taken for another one",
    ),
    Mutant(
        COLLECTOR,
        "        self.pending.admitted.sort(key=itemgetter(0))  # demonstrations were admitted as they came\n",
        "",
        "a batch has another order than the log",
    ),
    Mutant(
        COLLECTOR,
        "for number in waiting.numbers if waiting else ():",
        "for number in ():",
        "a resumed learner does not know the repeat of a group that it holds",
    ),
    Mutant(
        COLLECTOR,
        "min(self.waiting.unread, default=self.cursor + 1) - 1 if self.waiting else self.cursor",
        "self.cursor",
        "a resumed learner never reads the groups that it held",
    ),
    Mutant(
        COLLECTOR,
        "if len(valid) < min(2, group.ticket.group_size):",
        "if len(valid) < group.ticket.group_size:",
        "a group with one broken episode is dropped",
    ),
    Mutant(
        WAITING,
        "chosen = sorted(self._held)[:wanted]",
        "chosen = sorted(self._held)[-wanted:]",
        "a step takes the newest groups, and the oldest become stale",
    ),
    Mutant(
        WAITING,
        "chosen = sorted(self._held)[:wanted]",
        "chosen = list(self._held)[:wanted]",
        "a step takes what came first",
    ),
    Mutant(
        WAITING,
        "and left_over > (last - version) * wanted",
        "and left_over > (last - version + 1) * wanted",
        "a step does not wait for what no later one may train",
    ),
    Mutant(
        WAITING,
        "                and consumed.missing_below(below)\n",
        "",
        "a step waits for tickets that have all come",
        "the credit never leaves more than the steps up to the deadline train, so the condition before it is false",
    ),
    Mutant(
        WAITING,
        "self._deadlines.append(Deadline(below, self._schedule.trainable_until(version)))",
        "self._deadlines.append(Deadline(below, self._schedule.trainable_until(version) + 1))",
        "deadlines a step too late",
    ),
    Mutant(
        WAITING,
        '"held": sorted([*held, *map(list, self.unread.items())]),',
        '"held": [],',
        "a commit forgets the groups that are held",
    ),
    Mutant(
        ACCOUNTS,
        'numbers=TicketNumbers(values["ended"]),',
        "numbers=TicketNumbers(),",
        "a resumed learner does not know which tickets have ended",
    ),
    # ---- the learner: commits and recovery
    Mutant(
        STATE,
        "            cursor=self.collector.cursor,\n            accounts=accounts.dump(),",
        "            cursor=max(0, self.collector.cursor - 1),\n            accounts=accounts.dump(),",
        "a commit reads its last entry again",
    ),
    Mutant(
        STATE,
        "self.rounds = Rounds(self.eval_tasks, self.last_commit.rounds)",
        "self.rounds = Rounds(self.eval_tasks)",
        "a resumed learner has forgotten half of an evaluation",
    ),
    Mutant(
        RECOVERY,
        "self.state.lineage = max(lineages, default=-1) + 1",
        "self.state.lineage = max(max(lineages, default=0), 0)",
        "a lineage is used twice",
    ),
    Mutant(RECOVERY, "self.ports.journal.rewind(step)", "pass", "a step has two lines"),
    Mutant(
        RECOVERY,
        "            await self.publication.announcer.announce_weights(digest)\n",
        "            pass\n",
        "actors go on with weights that were rolled back",
    ),
    Mutant(
        RECOVERY,
        "            self.state.restore(checkpoint.state)\n".replace(
            "            ", "                "
        ),
        "",
        "a resumed learner begins at step 0 with the weights of its checkpoint",
    ),
    Mutant(
        RECOVERY,
        "await self.ports.fence.announce(earlier or self.state.progress())",
        "pass",
        "a learner speaks before it has fenced the one before it",
        "its own first word, a moment later, fences as well",
    ),
    Mutant(
        RECOVERY,
        "        await self._sealing  # one checkpoint at a time\n",
        "",
        "two checkpoints are written at once",
    ),
    Mutant(
        RECOVERY,
        "        await asyncio.to_thread(self.ports.checkpoints.seal, step, state)\n",
        "        await until_stopped(self.log_space.free(), self.ports.stopping)\n"
        "        await asyncio.to_thread(self.ports.checkpoints.seal, step, state)\n",
        "the log is freed before the checkpoint is durable",
        "what is freed is what the checkpoints on the disk do not need",
    ),
    Mutant(
        SPACE,
        "positions.append(min([position, *checkpoint.held]))",
        "positions.append(position)",
        "the log is freed of groups that a checkpoint holds",
    ),
    Mutant(
        SPACE,
        "return min(positions, default=0)",
        "return max(positions, default=0) + 3",
        "the log is freed of what the newest checkpoint has not read",
    ),
    Mutant(
        FENCE,
        "self._progress = await self._state.put(Key.PROGRESS, progress, self._progress)",
        "self._progress = await self._state.put(Key.PROGRESS, progress)",
        "a learner that was replaced speaks on",
    ),
    Mutant(
        FENCE,
        "            return\n        # A key that no longer decodes",
        "            return\n        return\n        # A key that no longer decodes",
        "a learner that was replaced frees and sends on",
    ),
    Mutant(
        PUBLICATION,
        "        await self.recorder.record_commit(background, step, digest)\n"
        "        await until_stopped(self.announcer.announce_version(digest), self.ports.stopping)\n",
        "        await until_stopped(self.announcer.announce_version(digest), self.ports.stopping)\n"
        "        await self.recorder.record_commit(background, step, digest)\n",
        "a step is known before it has a line in the ledger",
    ),
    Mutant(
        "learner/loop/announcer.py",
        "            await self.announce_weights(weights_digest)\n",
        "            await self.announce_progress()\n            await self.announce_weights(weights_digest)\n",
        "tickets name a version before its weights are there",
    ),
    Mutant(
        "learner/loop/announcer.py",
        "        if self._step == self._state.step:\n",
        "        if True:\n",
        "what is consumed tells of a step whose weights are on their way",
    ),
    Mutant(
        LOOP,
        "await self.publication.ended()  # one version at a time",
        "pass",
        "two versions are published at once",
    ),
    Mutant(
        LOOP,
        "        pending = state.commit()\n",
        "        state.commit()\n        pending = state.collector.pending\n",
        "the ledger has another batch than the one that was trained",
    ),
    Mutant(
        INTAKE,
        "if collector.read_again(entry, self._state.position):",
        "if False:",
        "a resumed learner takes what it had read for repeats",
    ),
    Mutant(
        INTAKE,
        "                if await self._log_space.is_short(state.last_commit.cursor):\n                    return\n",
        "",
        "a learner waits for groups that have no room in the log",
    ),
)


def read_mutated(mutant: Mutant) -> None:
    """Let this process read the mutant's file with its line replaced."""
    file = ROOT / mutant.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutant.old) < 1:
        raise SystemExit(f"{mutant.file} has no line {mutant.old!r}: mend the mutant")
    mutated = source.replace(mutant.old, mutant.new, 1)
    genuine = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = Path(loader.get_filename(name))
        if path.resolve() == file.resolve():
            return compile(mutated, str(path), "exec")
        return genuine(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def hunt(number: int, seeds: range) -> dict[str, Any]:
    """Simulate a mutant until a seed kills it; say which one, and by what."""
    mutant = MUTANTS[number]
    words = [sys.executable, "-m", "tests.simulation", "mutant", str(number)]
    words += ["--seeds", f"{seeds.start}:{seeds.stop}"]
    report = {"number": number, "file": mutant.file, "why": mutant.why}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=REAL_S, cwd=ROOT, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return report | {"killed": True, "by": f"nothing for {REAL_S:g} s"}
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:]
    return report | {"killed": done.returncode == 3, "by": lines[-1] if lines else ""}
