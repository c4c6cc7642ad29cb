"""What the control plane costs when actors are added. Run it from a clone.

    python -m tests.scale [--actors N ...] [--small] [--json FILE]

Light actors are real ones (`ActorLoop`, leases, weights, groups) with a policy of random tokens and the environment
`parity`. Thousands of them are tasks of a few processes, each with a connection of its own. The server, the controller
and the learner are real processes; the learner's engine only hashes what it trains on.

How to read it: the machine is busy in every row from 10 actors on, so `groups/s` is what its cores allow, and most of
them play episodes. `CPU ms` is the CPU time of server, controller and learner per settled group: the cost that an actor
adds elsewhere. It should not depend on the number of actors. Messages and bytes are those that the server counts, in
and out.
"""

import argparse
import sys
from collections.abc import Sequence

from horizonrl.common.errors import HorizonError
from horizonrl.ops.cli.help import new_file, number_within
from tests.scale.table import run


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--actors",
        nargs="+",
        type=number_within(1),
        default=(),
        metavar="N",
        help="only these; 1 10 100 1000 5000 by default, and a restart",
    )
    parser.add_argument("--small", action="store_true", help="1 and 20 actors, for seconds each")
    parser.add_argument(
        "--json", dest="json_file", type=new_file, metavar="FILE", help="write the result to a file"
    )
    options = parser.parse_args(argv)
    return run(options.actors, options.small, options.json_file)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HorizonError as error:
        sys.exit(f"error: {error}")
