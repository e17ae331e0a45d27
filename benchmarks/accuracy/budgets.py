"""Budgets of servers: kinds that a server has words for, profile files, and two that are calibrated here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.errors import SettingsError
from benchmarks.recall import MODEL
from sgl_ragged.profiles.profile_choice import AUTO, BUNDLED, UNIFORM
from sgl_ragged.scorers import get_scorer

PROFILES = MODEL.parent / "profiles"

SERVED = (UNIFORM, AUTO, BUNDLED)
"""Kinds of budgets that a server has words for."""

CALIBRATED = {"coverage-all": ("--queries", "all"), "coverage": ()}
"""Kinds of budgets that are calibrated here, with the options of `python -m calib run` for each."""

SCORER = "{scorer}"
"""Stands for the scorer's name in the name of a profile file."""

CALIBRATED_AT = 0.3
"""The ratio of new profiles. Coverage curves do not depend on it."""


def check_names(budgets: Sequence[str], scorers: Sequence[str]) -> None:
    """Raises SettingsError for budgets that are neither a kind nor files, or that results could not tell apart."""
    for name in budgets:
        files = [Path(name.replace(SCORER, scorer)) for scorer in scorers]
        if name not in (*SERVED, *CALIBRATED) and (missing := [file for file in files if not file.is_file()]):
            known = ", ".join((*SERVED, *CALIBRATED))
            raise SettingsError(f"--budgets {name}: {missing[0]} is no file, and no kind of budgets ({known})")
    if len({label(name) for name in budgets}) < len(budgets):
        raise SettingsError("--budgets must differ, and profiles must have different file names")


def label(name: str) -> str:
    """Name of these budgets in results: the kind, or the profile's file name without suffix."""
    return name if name in (*SERVED, *CALIBRATED) else Path(name).stem


def flags(scorer: str, name: str) -> list[str]:
    """Flags that give a server these budgets, and the scorer its statistics."""
    if name in CALIBRATED:
        return ["--ragged-profile", str(_calibrated(scorer, name))]
    if name not in SERVED:
        return ["--ragged-profile", name.replace(SCORER, scorer)]
    weights = ["--ragged-scorer-weights", str(_calibrated(scorer, "coverage"))] if _needs_statistics(scorer) else []
    return ["--ragged-profile", name, *weights]


def calibrate(scorers: Sequence[str], budgets: Sequence[str], segment: int) -> None:
    """Make the recall model's profiles that are missing; all of them share one set of recordings.

    Raises:
        SettingsError: `calib run` failed; it has said why.
    """
    kinds = {name for name in budgets if name in CALIBRATED}
    if any(name in SERVED for name in budgets) and any(_needs_statistics(scorer) for scorer in scorers):
        kinds.add("coverage")
    missing = [kind for kind in kinds if not all(_calibrated(scorer, kind).is_file() for scorer in scorers)]
    if not missing:
        return
    PROFILES.mkdir(parents=True, exist_ok=True)
    data = PROFILES / "samples.jsonl"
    with data.open("w") as file:
        subprocess.run([sys.executable, "-m", "benchmarks.recall.samples"], stdout=file, check=True)
    # Recordings belong to the scorers that they were made for.
    work = PROFILES / "-".join(["recordings", *scorers])
    command = [sys.executable, "-m", "calib", "run", "--model", str(MODEL), "--dtype", "float32", "--data", str(data)]
    command += ["--segment", str(segment), "--ratio", str(CALIBRATED_AT), "--work", str(work), "--scorer", *scorers]
    for kind in missing:
        made = subprocess.run(
            [*command, *CALIBRATED[kind], "-o", str(_calibrated(SCORER, kind))], stdout=subprocess.DEVNULL
        )
        if made.returncode:
            raise SettingsError(f"budgets {kind} could not be calibrated (see above)")


def _needs_statistics(scorer: str) -> bool:
    """True if calibration makes everything that the scorer needs; it does not make trained gates."""
    found = get_scorer(scorer)
    return bool(found.statistics) and not found.reads_hidden_states


def _calibrated(scorer: str, kind: str) -> Path:
    return PROFILES / f"{scorer}-{kind}.safetensors"
