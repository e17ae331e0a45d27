"""The budgets that a server is given: equal, bundled, from a profile file, or calibrated for the recall model."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.cells import Key
from benchmarks.harness.errors import SettingsError
from benchmarks.recall import MODEL
from sgl_ragged.launch.model_options import read_sizes
from sgl_ragged.launch.plan import choose_budgets
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile_choice import AUTO, BUNDLED, UNIFORM, named_profile
from sgl_ragged.scorers import get_scorer
from sgl_ragged.scorers.statistics import scorer_statistics

PROFILES = MODEL.parent / "profiles"

SERVED = (UNIFORM, AUTO, BUNDLED)
"""Kinds of budgets that a server has words for."""

CALIBRATED = {
    "coverage-all": ("--queries", "all"),
    "coverage-layer": ("--scope", "layer"),
    "coverage": (),
}
"""Kinds of budgets that are calibrated here, with the options of `python -m calib run` for each."""

SCORER = "{scorer}"
"""Stands for the scorer's name in the name of a profile file."""


def is_recall_model(model: str) -> bool:
    return Path(model).resolve() == MODEL.resolve()


def check_names(budgets: Sequence[str], scorers: Sequence[str], model: str) -> None:
    """Raises SettingsError for unknown budgets, and for those that cannot be made for this model."""
    for name in budgets:
        if name in SERVED:
            continue
        if name in CALIBRATED:
            if not is_recall_model(model):
                raise SettingsError(
                    f"--budgets {name} is calibrated here for the recall model only: run `python -m calib run --model "
                    f"{model} --scorer {' '.join(scorers)} -o FILE`, and give --budgets FILE"
                )
            continue
        for scorer in scorers:
            path = Path(name.replace(SCORER, scorer))
            if not path.is_file():
                known = ", ".join((*SERVED, *CALIBRATED))
                raise SettingsError(f"--budgets {name}: {path} is no file, and no kind of budgets ({known})")
    labels = [label(name) for name in budgets]
    if len(set(labels)) < len(labels):
        raise SettingsError("--budgets must differ, and profiles must have different file names")


def label(name: str) -> str:
    """Name of these budgets in results: the kind, or the profile's file name without suffix."""
    return name if name in (*SERVED, *CALIBRATED) else Path(name).stem


def is_there(scorer: str, name: str, profiles: Path) -> bool:
    """Whether these budgets need no calibration first."""
    return name not in CALIBRATED or _calibrated(profiles, scorer, name).is_file()


def flags(scorer: str, name: str, profiles: Path) -> list[str]:
    """Flags that give a server these budgets, and the scorer its statistics."""
    if name in CALIBRATED:
        return ["--ragged-profile", str(_calibrated(profiles, scorer, name))]
    if name not in SERVED:
        return ["--ragged-profile", name.replace(SCORER, scorer)]
    statistics = _calibrated(profiles, scorer, "coverage")
    needs = get_scorer(scorer).statistics and statistics.is_file()
    return ["--ragged-profile", name, *(["--ragged-scorer-weights", str(statistics)] if needs else [])]


def digest(key: Key, given: Sequence[str], model: str, segment: int) -> str | None:
    """Digest of the profile that a server with these flags takes its budgets from.

    None without a profile, and where the server finds or calibrates one by itself.

    Raises:
        RaggedConfigError: the profile is damaged, made for another model or scorer, does not serve the ratio, or the
            scorer lacks its statistics: what the server would say once it has been started.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ragged-profile")
    parser.add_argument("--ragged-scorer-weights")
    known, _ = parser.parse_known_args(list(given))
    assert key.scorer is not None
    assert key.ratio is not None
    if known.ragged_profile == AUTO:
        return None
    geometry = read_sizes(Path(model), lambda config: ModelGeometry.from_config(config, model))
    profile = named_profile(known.ragged_profile, geometry, key.scorer)
    chosen = choose_budgets(geometry, profile=profile, scorer=key.scorer, ratio=key.ratio, segment=segment)
    scorer_statistics(
        get_scorer(key.scorer),
        chosen.profile,
        known.ragged_scorer_weights,
        geometry.num_layers,
        geometry.num_heads,
    )
    return chosen.profile.digest() if chosen.profile else None


def calibrate(scorers: Sequence[str], budgets: Sequence[str], profiles: Path, segment: int, ratio: float) -> None:
    """Make the recall model's profiles that are missing in the folder; all methods share one set of recordings.

    Raises:
        SettingsError: `calib run` failed; it has said why.
    """
    kinds = [name for name in budgets if name in CALIBRATED]
    equal = any(name in SERVED for name in budgets)
    if equal and "coverage" not in kinds and any(_needs_statistics(scorer) for scorer in scorers):
        kinds.append("coverage")
    if all(_calibrated(profiles, scorer, kind).is_file() for scorer in scorers for kind in kinds):
        return
    profiles.mkdir(parents=True, exist_ok=True)
    data = profiles / "samples.jsonl"
    with data.open("w") as file:
        subprocess.run([sys.executable, "-m", "benchmarks.recall.samples"], stdout=file, check=True)
    # Recordings belong to the scorers that they were made for.
    work = profiles / "-".join(["recordings", *scorers])
    command = [sys.executable, "-m", "calib", "run", "--model", str(MODEL), "--dtype", "float32", "--data", str(data)]
    command += ["--segment", str(segment), "--ratio", str(ratio), "--work", str(work), "--scorer", *scorers]
    for kind in kinds:
        target = _calibrated(profiles, SCORER, kind)
        made = subprocess.run([*command, *CALIBRATED[kind], "-o", str(target)], stdout=subprocess.DEVNULL)
        if made.returncode:
            raise SettingsError(f"budgets {kind} could not be calibrated (see above)")


def _needs_statistics(scorer: str) -> bool:
    """Whether calibration makes everything that the scorer needs; it does not make trained gates."""
    found = get_scorer(scorer)
    return bool(found.statistics) and not found.reads_hidden_states


def _calibrated(profiles: Path, scorer: str, kind: str) -> Path:
    return profiles / f"{scorer}-{kind}.safetensors"
