"""Does a run survive, does it stay within its bounds, and does anything grow? Run it from a clone.

    python -m tests.faults chaos --kills 100 --seed 7 [--section.key=value ...]
    python -m tests.faults soak --minutes 60 [--section.key=value ...]
    python -m tests.faults fuzz --payloads 1000000

`chaos` kills, stops, delays and repeats at random while a real run goes on: NATS, controller, learner and two scripted
actors, one process each. It compares the run with its own record, and with an undisturbed training run over the same
log. How to read it: a run passes if `lost`, `doubled` and every `*_violations` are 0 and `digest_equal` is true.
`repeats` counts groups that arrived twice and were recognised, `void` tickets that ended without a group, and `crashes`
the exit codes that no signal explains. The command exits with 1 and keeps all files if there is a finding.

    plan      the events as a pure function of their number and a seed
    storm     fires them
    damage    those that befall data: stores that go back, rot, meddling hands
    cluster   the processes of the run
    proxy     delays and breaks their connections to the broker
    verdict   judges what the run left behind

`soak` runs the same processes undisturbed and samples memory, descriptors, threads, streams and files. How to read it:
a value that levels off is fine. `per hour` is the slope of the second half; a steady slope is a leak, or for files and
streams the price of running on.

`fuzz` sends mutated payloads through the decoder and the collector. How to read it: every payload must come out as a
record or as one of the three RecordErrors; a count under `other`, or memory above the limits, fails the bench.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from horizonrl.common.errors import HorizonError
from horizonrl.ops.cli.help import new_file, number_within
from horizonrl.ops.cli.overrides import split_overrides
from tests.faults import chaos, fuzz, soak


def main(argv: Sequence[str]) -> int:
    """Run one of them. Return 0 if it passes."""
    words, overrides = split_overrides(argv)
    parser = _parser()
    options = parser.parse_args(words)
    match options.what:
        case "chaos":
            overrides = [f"--actor.engine={options.engine}", *overrides]
            request = chaos.ChaosRequest(options.kills, options.seed, options.servers, overrides)
            return chaos.run(request, options.json_file, options.directory)
        case "soak":
            return soak.run(
                options.minutes, options.seed, options.json_file, options.directory, overrides
            )
    if overrides:
        parser.error(f"{options.what} takes no key of the config")
    return fuzz.run(options.payloads, options.seed, options.json_file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("chaos", "soak", "fuzz"))
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="0 by default")
    parser.add_argument(
        "--json", dest="json_file", type=new_file, metavar="FILE", help="write the result to a file"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="of chaos and soak: a new directory; temporary by default",
    )
    parser.add_argument(
        "--kills",
        type=number_within(1),
        default=20,
        metavar="N",
        help="events of chaos, at least a sixth of them for each role; 20",
    )
    parser.add_argument(
        "--engine",
        choices=("scripted", "vllm"),
        default="scripted",
        help="the actors' engine under chaos; scripted by default",
    )
    parser.add_argument(
        "--servers",
        type=int,
        choices=(1, 3, 5),
        default=1,
        help="nats-servers under chaos; with 3 or 5, events also pause them and cut them off; 1",
    )
    parser.add_argument(
        "--minutes",
        type=number_within(0.1),
        default=60.0,
        metavar="M",
        help="of soak; 60 by default",
    )
    parser.add_argument(
        "--payloads",
        type=number_within(1),
        default=10_000,
        metavar="N",
        help="of fuzz; 10000 by default",
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HorizonError as error:
        sys.exit(f"error: {error}")
