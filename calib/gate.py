"""Training of the scorer `gate`, which predicts from hidden states alone which tokens later segments will attend to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch.nn.functional import gelu

from calib.coverage import coverage_curves
from calib.measure import BASELINE, Settings, hidden_states_file
from calib.recorder import HIDDEN_STATES
from sgl_ragged.scorers.gate import Gate

FEATURES = 128
"""Width of the hidden layer."""

STEPS, BATCH, RATE, DECAY = 450, 512, 2e-3, 1e-2
"""Steps of AdamW per layer, tokens per step, largest learning rate (a linear rise over a tenth, then cosine), decay."""

HELD_OUT = 8
"""Every eighth sample is held out from training, and the results on it are reported."""

FLOOR = 1e-6
"""Attention below this value counts as none: its logarithm is far from all others and has no meaning."""


@dataclass(frozen=True)
class Trained:
    """`statistics`: the scorer's tensors [layers, heads or 1, ...], float16.

    `losses`: float64 [layers, 2], weighted squared error on the samples trained on and held out, in variances of the
    target: 1 is what a constant would leave.
    """

    statistics: dict[str, torch.Tensor]
    losses: np.ndarray


def train_gates(
    settings: Settings,
    recordings: Sequence[dict[str, torch.Tensor]],
    folder: Path,
    queries: str,
    ratio: float,
    advance: Callable[[], None],
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Train on the files that `measure` left in the folder, and add the gates' scores of each sample to its recording.

    Returns:
        The scorer's tensors [layers, heads or 1, ...], and `Profile.held_out`.
    """
    paths = [hidden_states_file(folder, number) for number in range(len(recordings))]
    trained = train(recordings, paths, settings.segment, advance, queries=queries)
    for recording, path in zip(recordings, paths, strict=True):
        recording[f"{Gate.name}.scores"] = gate_scores(trained.statistics, path, settings.segment)
    # Few samples have nothing held out: then those trained on.
    held = recordings[HELD_OUT - 1 :: HELD_OUT] or recordings
    covered = [_covered(held, queries, scores, ratio) for scores in (Gate.name, BASELINE, None)]
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
    hidden_states: Sequence[Path],
    segment: int,
    advance: Callable[[], None],
    *,
    queries: str = "all",
    seed: int = 0,
) -> Trained:
    """Train one network per layer; the same arguments give the same weights on the same machine.

    Args:
        recordings: what `measure` returns, one per sample, with `peaks.<queries>`.
        hidden_states: files with HIDDEN_STATES, one per sample.
        advance: called once per layer.
    """
    layers = recordings[0][f"peaks.{queries}"].shape[0]
    statistics: dict[str, list[torch.Tensor]] = {name: [] for name in Gate.statistics}
    losses = []
    for layer in range(layers):
        inputs = [_layer(path, layer) for path in hidden_states]
        goals = [target(recording[f"peaks.{queries}"][layer], segment) for recording in recordings]
        weights = [weight(recording[f"peaks.{queries}"][layer]) for recording in recordings]
        tensors, loss = train_layer(inputs, goals, weights, seed=seed + layer)
        for name, tensor in tensors.items():
            statistics[name].append(tensor)
        losses.append(loss)
        advance()
    return Trained({name: torch.stack(tensors).half() for name, tensors in statistics.items()}, np.array(losses))


def target(peaks: torch.Tensor, segment: int) -> torch.Tensor:
    """What the network has to predict: log of the peak attention, centred in each segment.

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


def _layer(path: Path, layer: int) -> torch.Tensor:
    with safe_open(str(path), framework="pt") as file:
        return file.get_slice(HIDDEN_STATES)[layer]


def gate_scores(statistics: Mapping[str, torch.Tensor], hidden_states: Path, segment: int) -> torch.Tensor:
    """Scores that serving would give: float32 [segments, layers, heads, S]."""
    scorer, layers = Gate(), []
    for layer in range(len(statistics["skip"])):
        scores = scorer.token_scores(_layer(hidden_states, layer), {n: t[layer] for n, t in statistics.items()})
        layers.append(scores.unflatten(0, (-1, segment)).transpose(1, 2))
    return torch.stack(layers, dim=1)
