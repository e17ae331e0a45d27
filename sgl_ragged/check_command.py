"""`sgl-ragged check`: functions of the installed SGLang beside those that this plugin was made for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence

from sgl_ragged.contract_checks import SAME, STATES, Seam, check_contract, compare, installed_release, is_tested
from sgl_ragged.launch.feature import EVERY_SERVER, contracts
from sgl_ragged.sglang_contract import RELEASES, SERVING


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sgl-ragged check`."""
    parser.add_argument("--json", action="store_true", help="every function with its state")


def check_installation(options: argparse.Namespace) -> None:
    """Print what was compared; raises RaggedConfigError if no server with --kv-pool ragged would start."""
    release = installed_release()
    found = {needed_for: compare(functions) for needed_for, functions in contracts().items()}
    print(as_json(release, found) if options.json else as_table(release, found))
    check_contract(SERVING)


def as_json(release: str, found: Mapping[str, Sequence[Seam]]) -> str:
    """Return release, whether it is tested, and each function as its path, state, parameters and what needs it."""
    functions = [
        {"function": seam.target, "needed_for": needed_for, "state": seam.state, "parameters": seam.parameters}
        for needed_for, seams in found.items()
        for seam in seams
    ]
    return json.dumps({"sglang": release, "tested": is_tested(release), "functions": functions})


def as_table(release: str, found: Mapping[str, Sequence[Seam]]) -> str:
    """Return counts by what needs the functions, then each function that differs, with what needs it."""
    lines = [f"SGLang {release} {_verdict(release, found)}", _row("functions", STATES)]
    differing: dict[Seam, list[str]] = {}
    for needed_for, seams in found.items():
        states = [seam.state for seam in seams]
        lines.append(_row(needed_for, [states.count(state) for state in STATES]))
        for seam in seams:
            if seam.state != SAME:
                differing.setdefault(seam, []).append(needed_for)
    lines += [f"{seam}: for {', '.join(needed)}" for seam, needed in differing.items()]
    return "\n".join(lines)


def _verdict(release: str, found: Mapping[str, Sequence[Seam]]) -> str:
    if is_tested(release):
        return "was tested with this plugin"
    outcome = "start with a warning" if all(seam.fits for seam in found[EVERY_SERVER]) else "do not start"
    return f"was not tested with this plugin ({RELEASES[-1]} was): servers {outcome}"


def _row(needed_for: str, cells: Iterable[str | int]) -> str:
    return f"{needed_for:28}" + "".join(f"{cell:>18}" for cell in cells)
