"""Run scenarios and compare them with the table; the package says what for."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.gpu_contract import fake_runtime, scenarios, table
from tests.gpu_contract.fake_tensor import FakeDevice
from tests.gpu_contract.recording import REC
from tests.gpu_contract.server import LAYERS


def run(names: list[str]) -> table.Found:
    """What scenarios ask of the device."""
    found: table.Found = {}
    for name in names:
        REC.phases.clear()
        with FakeDevice():
            scenarios.SCENARIOS[name](name)
        for phase in REC.phases:
            if phase != "start-up":
                faults = REC.faults(phase)
                found[phase] = REC.counts(phase, LAYERS) | ({"faults": faults} if faults else {})
    return found


def where(phase: str) -> list[str]:
    """Which lines of the project asked for what in a phase."""
    counts: Counter[tuple] = Counter()
    for event in REC.phases[phase]:
        counts[event.kind, event.name, event.at, event.layer is not None] += event.count
    return [
        f"      {times:5d} {'in layers' if layered else 'once':9s} {kind:10s} {name:28s} {at}"
        for (kind, name, at, layered), times in counts.most_common()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_contract", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(scenarios.SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="the default path and a scorer with kernels alone")
    parser.add_argument("--update", action="store_true", help="write the table anew from what is found")
    parser.add_argument("-v", "--verbose", action="store_true", help="every line that asks for something")
    options = parser.parse_args()
    names = options.scenarios or list(scenarios.QUICK if options.quick else scenarios.SCENARIOS)
    torch.set_num_threads(1)
    fake_runtime.install()
    found: table.Found = {}
    for name in names:
        found |= run([name])
        if options.verbose:
            for phase in list(REC.phases):
                print(phase, *where(phase), sep="\n")
    print(*table.shown(found), sep="\n")
    known = table.read()
    if options.update:
        kept = {phase: counts for phase, counts in known.items() if phase.split(":")[0] not in names}
        kept = {phase: counts for phase, counts in kept.items() if phase.split(":")[0] in scenarios.SCENARIOS}
        table.write(kept | found)
        return 0
    fallen, risen = list(table.falls(found, known)), list(table.rises(found, known))
    for line in fallen:
        print(f"fallen: {line}; --update writes that down")
    for line in risen:
        print(f"RISEN: {line}")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
