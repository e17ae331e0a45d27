"""Command `convert`: make a profile from a measured npz file that TANGRAM's reference implementation published."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from calib.measured import Measured, load_measured
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile import Profile

SEGMENT = 256
"""Tokens per segment in converted profiles. The files were measured over whole contexts, not over segments."""

PROVENANCE = (
    "published with TANGRAM's reference implementation, github aiha-lab/TANGRAM, "
    "tools/head_group_clustering/cluster_maps"
)
LICENSE = "Apache-2.0"

SHARES = {
    "evictable": "share kept between sinks and recent window, scaled to the ratio",
    "whole": "share kept of the whole context, sinks and recent window included",
}


@dataclass(frozen=True)
class Conversion:
    """A converted profile, and notes for its user, one sentence each."""

    profile: Profile
    notes: tuple[str, ...]


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `python -m calib`."""
    parser = commands.add_parser("convert", help="make a profile from a measured npz file", description=__doc__)
    parser.add_argument("measured", type=Path, metavar="PROFILE.npz")
    parser.add_argument(
        "--config", type=Path, help="the model's folder or config.json; without it, no server accepts the profile"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.safetensors")
    parser.add_argument(
        "--share", choices=SHARES, default="evictable", help="; ".join(f"{k}: {v}" for k, v in SHARES.items())
    )
    parser.add_argument("--means-only", action="store_true", help="leave out deviations and shares of single samples")
    parser.set_defaults(run=convert)


def convert(options: argparse.Namespace) -> None:
    """Write the profile, print the notes and one line about the file."""
    measured = load_measured(options.measured)
    config = None if options.config is None else read_config(options.config)
    source = f"sha256 {hashlib.sha256(options.measured.read_bytes()).hexdigest()[:16]}"
    made = to_profile(measured, config, options.share, means_only=options.means_only, source=source)
    try:
        made.profile.save(options.output)
    except (OSError, SafetensorError) as error:
        raise RaggedConfigError(f"cannot write {options.output}: {error}") from None
    for note in made.notes:
        print(f"note: {note}")
    profile = made.profile
    print(
        f"{options.output}: {profile.model_id}, {profile.scorer}, {profile.num_layers} layers x {profile.num_heads} "
        f"heads, mean share {profile.mu.mean():.4f}, digest {profile.digest()}"
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read the text model's configuration from a model folder or a config.json.

    Raises:
        RaggedConfigError: the file does not exist or is no model configuration.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        if not isinstance(config["num_hidden_layers"], int) or not isinstance(config["num_attention_heads"], int):
            raise ValueError("the numbers of layers and heads are no integers")
    except KeyError as error:
        raise RaggedConfigError(f"{path} is no model configuration, it lacks {error}") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RaggedConfigError(f"cannot read {path}: {error}") from None
    return config


def to_profile(
    measured: Measured,
    config: dict[str, Any] | None,
    share: str = "evictable",
    *,
    means_only: bool = False,
    source: str = "",
) -> Conversion:
    """Convert measured retention to a profile of method `implied` (TANGRAM Eq. 5 with alpha 0).

    alpha is 0 because the recent window of fixed length makes deviations between samples depend on their lengths.

    Args:
        config: the model's configuration; None leaves fingerprint and head_dim empty, which the server refuses.
        share: a key of SHARES. "evictable" is scaled to the ratio, "whole" is not.
        means_only: set deviations to zero and leave out shares of single samples.
        source: identity of the file, for the profile's provenance.

    Raises:
        RaggedConfigError: measured layers or heads differ from those of the configuration.
    """
    notes: list[str] = []
    fingerprint, head_dim = "", 0
    if config is None:
        notes.append("no --config: the profile has no fingerprint and no head_dim, so it can be inspected, not served")
    else:
        geometry = ModelGeometry.from_config(config, measured.model_id)
        _require_same_heads(measured, geometry)
        fingerprint, head_dim = geometry.fingerprint, geometry.head_dim
    shares = measured.whole if share == "whole" else measured.evictable
    mu, sigma = shares.mean(axis=0), shares.std(axis=0)
    if share == "evictable":
        factors = np.ones((len(mu), 1))
        scopes = [slice(layer, layer + 1) for layer in range(len(mu))] if measured.scope == "layer" else [slice(None)]
        for scope in scopes:
            factors[scope], reached = scale_to_ratio(mu[scope], measured.ratio)
            if not reached:
                where = f"layer {measured.layers[scope.start]}" if measured.scope == "layer" else "the model"
                num_keeping, num_heads = int((mu[scope] > 0).sum()), mu[scope].size
                notes.append(
                    f"{where}: {num_keeping} of {num_heads} heads keep tokens, so its mean share is "
                    f"{num_keeping / num_heads:.4f} and not {measured.ratio:g}; a server spreads the rest evenly over "
                    f"the other heads"
                )
        mu, sigma, shares = (np.minimum(factors * array, 1.0) for array in (mu, sigma, shares))
    origin = [PROVENANCE, SHARES[share]] + (["means only"] if means_only else []) + ([source] if source else [])
    profile = Profile(
        mu=mu.astype(np.float32),
        sigma=(np.zeros_like(sigma) if means_only else sigma).astype(np.float32),
        shares=None if means_only else shares.astype(np.float32),
        tasks=() if means_only else measured.tasks,
        model_id=measured.model_id,
        model_fingerprint=fingerprint,
        head_dim=head_dim,
        scorer=measured.scorer,
        method="implied",
        scope=measured.scope,
        ratio=measured.ratio,
        segment=SEGMENT,
        samples=len(measured.tasks),
        alpha=0.0,
        provenance="; ".join(origin),
        license=LICENSE,
    )
    return Conversion(profile=profile, notes=tuple(notes))


def scale_to_ratio(mu: np.ndarray, ratio: float) -> tuple[float, bool]:
    """Find the factor c with mean(min(1, c * mu)) = ratio, by water-filling.

    Args:
        mu: float array of any shape, non-negative.
        ratio: mean to reach, in (0, 1].

    Returns:
        c, and whether the mean is reached. It cannot be reached if fewer than ratio * size entries are positive; then c
        raises all positive entries to 1, or is 1 if there are none.
    """
    positive = np.sort(mu[mu > 0])[::-1].astype(np.float64)
    target = ratio * mu.size
    if len(positive) < target:
        return (float(1.0 / positive[-1]) if len(positive) else 1.0), False
    below = np.concatenate([np.cumsum(positive[::-1])[::-1], [0.0]])
    for full in range(len(positive)):
        factor = (target - full) / below[full]
        if factor * positive[full] <= 1.0:
            return float(factor), True
    return float(1.0 / positive[-1]), True


def _require_same_heads(measured: Measured, geometry: ModelGeometry) -> None:
    have = (measured.layers, measured.whole.shape[2])
    want = (geometry.layer_numbers, geometry.num_heads)
    if have != want:
        raise RaggedConfigError(
            f"the file was measured on {measured.model_id!r} in layers {list(have[0])} with {have[1]} heads each, but "
            f"by the configuration layers {list(want[0])} have full attention, with {want[1]} heads: pass the "
            f"configuration of that model"
        )
