"""Simulate whole runs in one thread on a virtual clock, each from a seed. Run it from a clone.

    python -m tests.simulation --seeds 0:1000 [--json FILE]
    python -m tests.simulation --seed 17 --trace
    python -m tests.simulation mutants [N ...] [--seeds 0:40] [--json FILE]

Controller, learner and actors run their real loops over the memory broker. The seed draws the recipe, the order of
what is ready, latencies, lost requests, kills, pauses and outages; afterwards the run's history, ledger and log are
judged. `--seed` repeats one run, callback by callback. `mutants` breaks one line of the protocol at a time, which some
seed has to notice.

How to read it: a seed passes if it prints nothing. The command exits with 1 if one fails.

    clock     the event loop, and the lives that share it
    broker    requests that are delayed, lost and repeated
    storm     what goes wrong, drawn from the seed
    roles     the roles, as their `main` wires them
    history   what took effect, in order
    model     whether the protocol allows that
    verdict   what must be true at the end
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.simulation import mutants


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=("runs", "mutants", "mutant"), default="runs")
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="of mutants")
    parser.add_argument("--seeds", type=seeds, metavar="A:B", help="from A up to B - 1")
    parser.add_argument("--seed", type=int, metavar="S", help="one seed")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to a file")
    options = parser.parse_args(argv)
    chosen = options.seeds or (
        range(100) if options.seed is None else range(options.seed, options.seed + 1)
    )
    if options.what == "mutants":
        return hunt_all(options.seeds or range(40), options.numbers, options.json)
    if options.what == "mutant":
        mutants.read_mutated(mutants.MUTANTS[options.numbers[0]])
    report = run_seeds(chosen, options.trace, stop=options.what == "mutant")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = bool(report["failures"])
    return mutants.KILLED if failed and options.what == "mutant" else int(failed)


def seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def run_seeds(chosen: range, trace: bool, stop: bool) -> dict[str, Any]:
    """Simulate seeds; print those that fail, and what they all came to."""
    from tests.simulation.run import simulate  # not above: a mutant is read first
    from tests.simulation.selection import selection

    began, failures, sums = time.perf_counter(), {}, Counter[str]()
    waited: list[tuple[float, bool]] = []
    for seed in chosen:
        outcome = simulate(seed, trace=trace)
        if trace:
            print("\n".join(outcome.lines))
        if outcome.findings:
            failures[seed] = outcome.findings
            print(f"seed {seed} ({outcome.profile})")
            for finding in outcome.findings[:20]:
                print(f"    {finding:.600}", flush=True)
            if stop:
                print(f"seed {seed}: {outcome.findings[0]:.300}")
                break
        counts = outcome.counts
        sums += Counter(
            runs=1,
            steps=counts.steps,
            lineages=counts.lineages,
            tickets=counts.tickets,
            repeats=counts.repeats,
            callbacks=outcome.callbacks,
            virtual_s=int(outcome.virtual_s),
        )
        if "--rl.stale=wait" in outcome.profile.overrides:
            waited += counts.durations
    took_s = time.perf_counter() - began
    report = {
        "seeds": [chosen.start, chosen.stop],
        "seeds_per_s": round(sums["runs"] / took_s, 2),
        **sums,
        "selection": selection(waited),
        "failures": failures,
    }
    if not stop:
        print({name: value for name, value in report.items() if name != "failures"})
        print(f"{len(failures)} of {sums['runs']} seeds fail: {list(failures)[:20]}")
    return report


def hunt_all(chosen: range, numbers: Sequence[int], file: Path | None) -> int:
    """Hunt the mutants with these numbers, or all. Return 1 if one survives that is not equivalent."""
    reports = []
    for number in numbers or range(len(mutants.MUTANTS)):
        mutant = mutants.MUTANTS[number]
        report = mutants.hunt(number, chosen) | {"equivalent": mutant.equivalent}
        reports.append(report)
        fate = "killed" if report["killed"] else "SURVIVES"
        print(f"{number:3} {fate} {mutant.file}: {mutant.why} | {report['by']:.160}", flush=True)
    killed = sum(report["killed"] for report in reports)
    print(
        f"{killed} of {len(reports)} mutants killed within seeds {chosen.start} to {chosen.stop - 1}"
    )
    if file is not None:
        file.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    return int(any(not report["killed"] and not report["equivalent"] for report in reports))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of texts have an order, too
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    sys.exit(main(sys.argv[1:]))
