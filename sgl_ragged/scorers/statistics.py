"""Statistics of a scorer: tensors from the profile or from a weights file, in addition to keys, values and queries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile import STATISTIC, Profile
from sgl_ragged.scorers.base import Scorer


def scorer_statistics(
    scorer: Scorer,
    profile: Profile | None,
    weights: str | Path | None,
    num_layers: int,
    num_heads: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> list[dict[str, torch.Tensor]]:
    """Load the tensors in `scorer.statistics` for the whole model.

    Args:
        weights: safetensors file with one tensor [num_layers, num_heads, ...] for each name, which may be another
            profile; None to take the tensors from `profile`.
        sizes: sizes of the model, by the names in `Scorer.axes`.

    Returns:
        Per layer, tensors float32 [heads, ...] by name, [1, ...] if heads share them.

    Raises:
        RaggedConfigError: a tensor is missing, of the wrong shape or not finite, or the scorer needs no weights file.
    """
    check_weights(scorer, weights)
    if not scorer.statistics:
        return [{} for _ in range(num_layers)]
    names = ", ".join(scorer.statistics)
    if weights is not None:
        source, tensors = f"weights file {weights}", _read(weights)
    elif profile is None:
        raise RaggedConfigError(
            f"scorer {scorer.name!r} needs statistics of this model ({names}) from a profile: make one with "
            f"python -m calib run --scorer {scorer.name}, and pass it as --ragged-profile, or as "
            f"--ragged-scorer-weights for its statistics alone"
        )
    else:
        source = "the profile"
        tensors = {name: torch.from_numpy(array) for name, array in profile.statistics.items()}
    missing = [name for name in scorer.statistics if name not in tensors]
    if missing:
        raise RaggedConfigError(f"{source} lacks {', '.join(missing)}, which scorer {scorer.name!r} needs")
    for name in scorer.statistics:
        heads = 1 if name in scorer.shared_statistics else num_heads
        if tensors[name].shape[:2] != (num_layers, heads):
            raise RaggedConfigError(
                f"{source}: {name} {tuple(tensors[name].shape)} must be [{num_layers} layers, {heads} heads, ...]"
            )
        if not np.isfinite(tensors[name].float().numpy()).all():
            raise RaggedConfigError(f"{source}: {name} has non-finite entries")
    _check_axes(scorer, tensors, sizes, source)
    reason = scorer.refuse_statistics(tensors)
    if reason is not None:
        raise RaggedConfigError(f"{source}: {reason}")
    return [{name: tensors[name][layer].float() for name in scorer.statistics} for layer in range(num_layers)]


def _check_axes(scorer: Scorer, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int], source: str) -> None:
    lengths = dict(sizes)
    for name, axes in scorer.axes.items():
        shape = tuple(tensors[name].shape[2:])
        expected_shape = tuple(lengths.get(axis, length) for axis, length in zip(axes, shape, strict=False))
        if len(shape) != len(axes) or shape != expected_shape or 0 in shape:
            expected = ", ".join(f"{lengths[axis]} ({axis})" if axis in lengths else axis for axis in axes)
            raise RaggedConfigError(
                f"{source}: {name} {tuple(tensors[name].shape)} must be [layers, heads, {expected}]"
            )
        lengths |= zip(axes, shape, strict=True)


def check_weights(scorer: Scorer, weights: str | Path | None) -> None:
    """Raise RaggedConfigError if a weights file is given but not read, or needed but missing."""
    if not scorer.statistics and weights is not None:
        raise RaggedConfigError(f"scorer {scorer.name!r} has no weights: remove --ragged-scorer-weights")
    if scorer.reads_hidden_states and not scorer.trained and weights is None:
        raise RaggedConfigError(
            f"scorer {scorer.name!r} needs trained gates ({', '.join(scorer.statistics)}): pass "
            f"--ragged-scorer-weights FILE (docs/scorers.md)"
        )


def _read(path: str | Path) -> Mapping[str, torch.Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            # Profiles store their statistics with a prefix.
            return {name.removeprefix(STATISTIC): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RaggedConfigError(f"weights file {path} cannot be read: {error}") from None
