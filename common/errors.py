"""The error tree. A message says what went wrong, with which value, and what to do about it.

HorizonError
├── ConfigError (ValueError)            the recipe or an override is wrong
├── MissingDependency (ImportError)     something is not installed; the message names the cure
├── RecordError (ValueError)            bytes that are not one of our records
│   ├── MalformedRecord                 not MessagePack, or a field is missing, mistyped or out of bounds
│   ├── UnknownSchema                   a schema version this program does not speak
│   ├── RecordTooLarge                  over the size limit, refused before it is decoded
│   ├── ForgedRecord                    of a ticket that was never issued, or not to its sender, or altered
│   └── PartsPurged                     the log no longer holds the parts that a message joins
├── BrokerError (ConnectionError)
│   ├── BrokerUnreachable               no server answers at the url
│   │   └── RunUnknown                  it answers, and has no streams of this run
│   ├── BrokerDenied                    the server refuses the credentials or a subject
│   ├── LeaseLost                       the ticket was given to another actor
│   ├── StateConflict                   a key was set by somebody else since it was last set here
│   └── LogGap                          the group log no longer holds what the cursor points at
├── EnvironmentFailure (RuntimeError)   the environment broke: the episode is void, never a zero reward
│   ├── EnvironmentTimeout (TimeoutError)
│   └── ContractBroken (TypeError)      it answered something other than an Observation or a Step
├── EpisodeUnfit (ValueError)           a first prompt or a demonstration is too long: no retry makes it fit
├── PolicyFailure (RuntimeError)        the inference engine failed this request
│   ├── ContextFull                     the conversation leaves no room for another turn: a cut, not a failure
│   ├── EngineDead                      the engine is gone; its process must be replaced
│   └── WeightsRejected                 a digest or a probe does not match; the old weights stay
│       └── WeightsDamaged              what the broker holds does not make the version that was announced
├── CheckpointError (RuntimeError)      a checkpoint cannot be written or read
│   └── CheckpointMismatch              the run directory, or a checkpoint in it, is not of this run
└── RunFailed (RuntimeError)            a part of the run ended that should not have
    ├── Fenced                          another learner speaks for this run
    ├── PartGaveUp                      a part ended that would end the same way again
    ├── NoGroups                        tickets end without a group, one after another
    ├── NothingToLearn                  hardly any group of these tasks has anything to learn from
    ├── OutOfMemory                     a step of the learner does not fit into its GPU
    └── LogFull                         the group log is full, and nothing in it may be freed
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of an OSError that free space mends. A write raises it without a file name."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: a suggestion if something resembles it, or a full stop.

    Of keys with dots, `rl.threads` means those that end alike (`learner.threads`), before those that look alike. If
    nothing looks alike, `alfworld` means the names that contain it (`agentgym-alfworld`).
    """
    names = list(dict.fromkeys(choices))
    meant = (
        [name for name in names if _key(name) == _key(word)]
        or get_close_matches(word, names, n=2, cutoff=0.7)
        or [name for name in names if len(word) > 2 and word.lower() in name.lower()][:3]
    )
    return f"; did you mean {' or '.join(meant)}?" if meant else "."


def _key(name: str) -> str:
    return name.removeprefix("--").rpartition(".")[2].replace("-", "_")


class HorizonError(Exception):
    """Any error that HorizonRL raises on purpose."""

    exit_code = 1
    """Exit code of a program that it ends. 2 says that the same command would fail again."""


class ConfigError(HorizonError, ValueError):
    exit_code = 2


class MissingDependency(HorizonError, ImportError):
    exit_code = 2


class RecordError(HorizonError, ValueError): ...


class MalformedRecord(RecordError): ...


class UnknownSchema(RecordError): ...


class RecordTooLarge(RecordError): ...


class ForgedRecord(RecordError): ...


class PartsPurged(RecordError): ...


class BrokerError(HorizonError, ConnectionError): ...


class BrokerUnreachable(BrokerError): ...


class RunUnknown(BrokerUnreachable): ...


class BrokerDenied(BrokerError): ...


class LeaseLost(BrokerError): ...


class StateConflict(BrokerError): ...


class LogGap(BrokerError): ...


class EnvironmentFailure(HorizonError, RuntimeError): ...


class EnvironmentTimeout(EnvironmentFailure, TimeoutError): ...


class ContractBroken(EnvironmentFailure, TypeError):
    method = ""
    """The method that answered."""


class EpisodeUnfit(HorizonError, ValueError): ...


class PolicyFailure(HorizonError, RuntimeError): ...


class ContextFull(PolicyFailure): ...


class EngineDead(PolicyFailure): ...


class WeightsRejected(PolicyFailure): ...


class WeightsDamaged(WeightsRejected): ...


class CheckpointError(HorizonError, RuntimeError): ...


class CheckpointMismatch(CheckpointError):
    exit_code = 2


class RunFailed(HorizonError, RuntimeError): ...


class Fenced(RunFailed):
    exit_code = 2


class PartGaveUp(RunFailed):
    exit_code = 2


class NoGroups(RunFailed):
    exit_code = 2


class NothingToLearn(RunFailed):
    exit_code = 2
    opening = "hardly any group can be trained on"
    """How its message begins: a study tells a run that had nothing left to learn from one that broke."""


class LogFull(RunFailed):
    exit_code = 2


class OutOfMemory(RunFailed):
    exit_code = 2


def first_error(error: BaseException) -> BaseException:
    """Return an error, or the first one of a group, at whatever depth."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def raise_first(*kinds: type[Exception]) -> Iterator[None]:
    """Raise the first error of a group that has errors of these kinds alone: the command line reports one.

    A `raise` in an `except*` does not do: until Python 3.11.4 it raises a group again.
    """
    try:
        yield
    except ExceptionGroup as group:
        if group.split(kinds)[1] is None:
            raise first_error(group) from None
        raise
