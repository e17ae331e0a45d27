"""Training of the scorer `gate`, which predicts from hidden states alone which tokens later segments will attend to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu

from calib.coverage import coverage_curves
from calib.measure import BASELINE
from calib.recordings_folder import readable, save
from sgl_ragged.scorers.gate import Gate

FEATURES = 128
"""Width of the hidden layer."""

STEPS, BATCH, RATE, DECAY = 450, 512, 2e-3, 1e-2
"""Steps of AdamW per layer, tokens per step, largest learning rate (a linear rise over a tenth, then cosine), decay."""

HELD_OUT = 8
"""Every eighth sample is held out from training, and the results on it are reported."""

_LOSSES, _SCORES = "losses", "scores"
"""What a trained layer's file holds beside the scorer's tensors."""

FLOOR = 1e-6
"""Attention below this value counts as none: its logarithm is far from all others and has no meaning."""


@dataclass(frozen=True)
class Trained:
    """`statistics`: the scorer's tensors [layers, heads or 1, ...], float16.

    `losses`: float64 [layers, 2], weighted squared error on the samples trained on and held out, in variances of the
    target: 1 is what a constant would leave.
    `scores`: per sample, what serving would give: float32 [segments, layers, heads, S].
    """

    statistics: dict[str, torch.Tensor]
    losses: np.ndarray
    scores: list[torch.Tensor]


def train_gates(
    recordings: Sequence[dict[str, torch.Tensor]],
    hidden_states: Callable[[int], Sequence[torch.Tensor]],
    segment: int,
    folder: Path,
    queries: str,
    ratio: float,
    advance: Callable[[], None],
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Train on hidden states, and add the gates' scores of each sample to its recording. Arguments as for `train`.

    Returns:
        The scorer's tensors [layers, heads or 1, ...], and `Profile.held_out`.
    """
    trained = train(recordings, hidden_states, segment, folder, advance, queries=queries)
    for recording, scores in zip(recordings, trained.scores, strict=True):
        recording[f"{Gate.name}.scores"] = scores
    # Few samples have nothing held out: then those trained on.
    held = recordings[HELD_OUT - 1 :: HELD_OUT] or recordings
    covered = [_covered(held, queries, scorer, ratio) for scorer in (Gate.name, BASELINE, None)]
    return trained.statistics, np.column_stack([np.nan_to_num(trained.losses), *covered]).astype(np.float32)


def _covered(
    recordings: Sequence[Mapping[str, torch.Tensor]], queries: str, scorer: str | None, ratio: float
) -> np.ndarray:
    """[layers]: share of peak attention that the best `ratio` of tokens receive; without scorer, of those with most."""
    received, whole = [], []
    for recording in recordings:
        peaks = recording[f"peaks.{queries}"]
        segment = recording[f"{Gate.name}.scores"].shape[-1]
        ideal = peaks.unflatten(-1, (-1, segment)).permute(2, 0, 1, 3)
        curves = coverage_curves(recording[f"{scorer}.scores"] if scorer else ideal, peaks)
        received.append(curves[..., max(round(ratio * curves.shape[-1]), 1) - 1].sum(dim=(0, 2)))
        whole.append(curves[..., -1].sum(dim=(0, 2)))
    return (sum(received) / sum(whole)).numpy()


def train(
    recordings: Sequence[Mapping[str, torch.Tensor]],
    hidden_states: Callable[[int], Sequence[torch.Tensor]],
    segment: int,
    folder: Path,
    advance: Callable[[], None],
    *,
    queries: str = "all",
    seed: int = 0,
) -> Trained:
    """Train one network per layer; the same arguments give the same weights on the same machine.

    Args:
        recordings: what `measure` returns, one per sample, with `peaks.<queries>`.
        hidden_states: those of one layer, [tokens, hidden size] per sample. Layers are asked for in ascending order,
            each once.
        folder: where trained layers are kept; those that it holds are not trained again.
        advance: called once per layer.
    """
    layers, _, _ = recordings[0][f"peaks.{queries}"].shape
    found = []
    for layer in range(layers):
        path = folder / f"gate-{queries}-{layer:05d}.safetensors"
        if not readable(path):
            peaks = [recording[f"peaks.{queries}"][layer] for recording in recordings]
            save(_trained_layer(hidden_states(layer), peaks, segment, seed=seed + layer), path)
        found.append(load_file(path))
        advance()
    lengths = [recording[f"peaks.{queries}"].shape[-1] for recording in recordings]
    # Per sample: layers side by side, cut into segments.
    parts = zip(*(layer[_SCORES].split(lengths) for layer in found), strict=True)
    scores = [torch.stack(part).unflatten(1, (-1, segment)).permute(1, 0, 3, 2).contiguous() for part in parts]
    return Trained(
        {name: torch.stack([layer[name] for layer in found]) for name in Gate.statistics},
        np.array([layer[_LOSSES].tolist() for layer in found]),
        scores,
    )


def _trained_layer(
    inputs: Sequence[torch.Tensor], peaks: Sequence[torch.Tensor], segment: int, *, seed: int
) -> dict[str, torch.Tensor]:
    """One layer's tensors in float16, its losses, and the scores of all samples' tokens, float32 [tokens, heads]."""
    goals = [target(part, segment) for part in peaks]
    tensors, losses = train_layer(inputs, goals, [weight(part) for part in peaks], seed=seed)
    halves = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    scores = torch.cat([Gate().token_scores(part, halves) for part in inputs])
    return halves | {_LOSSES: torch.tensor(losses, dtype=torch.float64), _SCORES: scores.float().contiguous()}


def target(peaks: torch.Tensor, segment: int) -> torch.Tensor:
    """Targets of the network: log of the peak attention, centred in each segment.

    Tokens compete within their segment, and later segments have fewer queries behind them.

    Args:
        peaks: [heads, segments * S].

    Returns:
        float32 [segments * S, heads].
    """
    logs = peaks.float().clamp_min(FLOOR).log().unflatten(-1, (-1, segment))
    return (logs - logs.mean(dim=-1, keepdim=True)).flatten(1).T


def weight(peaks: torch.Tensor) -> torch.Tensor:
    """Weights of errors, larger where there is more attention: float32 [segments * S, heads]."""
    return (peaks.float().clamp_min(FLOOR) ** 0.25).T


def train_layer(
    inputs: Sequence[torch.Tensor], goals: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, seed: int
) -> tuple[dict[str, torch.Tensor], tuple[float, float]]:
    """One layer's tensors and its losses on the samples trained on and held out.

    Args:
        inputs: per sample, [tokens, hidden size]; goals, weights: per sample, [tokens, heads].
    """
    held = [number for number in range(len(inputs)) if number % HELD_OUT == HELD_OUT - 1]
    used = [number for number in range(len(inputs)) if number not in held]
    x, y, w = (torch.cat([part[n].float() for n in used]) for part in (inputs, goals, weights))
    mean, scale = x.mean(dim=0), 1 / x.std(dim=0).clamp_min(1e-4)
    spread = y.std(dim=0)
    x, y, w = (x - mean) * scale, y / spread, w / w.mean(dim=0)
    generator = torch.Generator().manual_seed(seed)
    size, heads = x.shape[1], y.shape[1]
    hidden = torch.randn(FEATURES, size, generator=generator) / size**0.5
    parameters = {
        "hidden": hidden,
        "hidden_bias": torch.zeros(FEATURES),
        "skip": torch.zeros(heads, size),
        "output": torch.zeros(heads, FEATURES),
        "level": torch.zeros(heads),
    }
    for tensor in parameters.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=DECAY, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator)
        loss = _loss(_foresee(parameters, x[batch]), y[batch], w[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    found = {name: tensor.detach() for name, tensor in parameters.items()}
    losses = []
    for numbers in (used, held):
        if not numbers:
            losses.append(float("nan"))
            continue
        x, y, w = (torch.cat([part[n].float() for n in numbers]) for part in (inputs, goals, weights))
        losses.append(float(_loss(_foresee(found, (x - mean) * scale), y / spread, w / w.mean(dim=0))))
    tensors = {
        "input_mean": mean[None],
        "input_scale": scale[None],
        "hidden": found["hidden"][None],
        "hidden_bias": found["hidden_bias"][None],
        "skip": found["skip"],
        "output": found["output"],
    }
    return tensors, (losses[0], losses[1])


def _foresee(parameters: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    features = gelu(inputs @ parameters["hidden"].T + parameters["hidden_bias"])
    return inputs @ parameters["skip"].T + features @ parameters["output"].T + parameters["level"]


def _loss(found: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights * (found - wanted).square()).mean()


def _rate(step: int) -> float:
    rise = STEPS / 10
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + np.cos(np.pi * step / STEPS))
