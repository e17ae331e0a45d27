"""Training of the scorer `gate`, which predicts from hidden states which tokens later segments will attend to."""

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
"""Steps of AdamW per layer, tokens per step, largest learning rate, weight decay. The learning rate rises linearly over
the first tenth of the steps and then falls as a cosine."""

HELD_OUT = 8
"""Every eighth sample is held out from training, and the results on these samples are reported."""

_LOSSES, _SCORES = "losses", "scores"
"""Tensors in a trained layer's file in addition to the scorer's."""

FLOOR = 1e-6
"""Smallest attention that targets distinguish: logarithms of smaller values are outliers without meaning."""


@dataclass(frozen=True)
class Trained:
    """Result of training.

    Args:
        statistics: the scorer's tensors [layers, heads or 1, ...], float16.
        losses: float64 [layers, 2], weighted squared error on training and on held-out samples, in variances of the
            target; a constant prediction has 1.
        scores: float32 [segments, layers, heads, S] per sample, the scores that serving gives.
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
    """Train gates, and add their scores of each sample to its recording.

    Args:
        ratio: share of the tokens whose coverage is reported.

    Other arguments are those of `train`.

    Returns:
        The scorer's tensors [layers, heads or 1, ...], and `Profile.held_out`.
    """
    trained = train(recordings, hidden_states, segment, folder, advance, queries=queries)
    for recording, scores in zip(recordings, trained.scores, strict=True):
        recording[f"{Gate.name}.scores"] = scores
    # Fewer than HELD_OUT samples leave none held out; then the training samples are reported.
    held_out = recordings[HELD_OUT - 1 :: HELD_OUT] or recordings
    covered = [_covered_share(held_out, queries, scorer, ratio) for scorer in (Gate.name, BASELINE, None)]
    return trained.statistics, np.column_stack([np.nan_to_num(trained.losses), *covered]).astype(np.float32)


def _covered_share(
    recordings: Sequence[Mapping[str, torch.Tensor]], queries: str, scorer: str | None, ratio: float
) -> np.ndarray:
    """Compute the share of peak attention that the best `ratio` of tokens receive: [layers].

    Args:
        scorer: ranks the tokens; None ranks them by peak attention itself.
    """
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
        recordings: results of `measure`, one per sample, with `peaks.<queries>`.
        hidden_states: function from a layer to its hidden states, [tokens, hidden size] per sample; called once per
            layer, in ascending order.
        folder: folder of trained layers; layers that it holds are not trained again.
        advance: called once per layer.
        queries: "all" or "answers", whose attention is the target.
    """
    num_layers, _, _ = recordings[0][f"peaks.{queries}"].shape
    layers = []
    for layer in range(num_layers):
        path = folder / f"gate-{queries}-{layer:05d}.safetensors"
        if not readable(path):
            peaks = [recording[f"peaks.{queries}"][layer] for recording in recordings]
            save(_trained_layer(hidden_states(layer), peaks, segment, seed=seed + layer), path)
        layers.append(load_file(path))
        advance()
    lengths = [recording[f"peaks.{queries}"].shape[-1] for recording in recordings]
    samples = zip(*(tensors[_SCORES].split(lengths) for tensors in layers), strict=True)
    # [layers, tokens, heads] -> [segments, layers, heads, S]
    scores = [torch.stack(sample).unflatten(1, (-1, segment)).permute(1, 0, 3, 2).contiguous() for sample in samples]
    return Trained(
        {name: torch.stack([tensors[name] for tensors in layers]) for name in Gate.statistics},
        np.array([tensors[_LOSSES].tolist() for tensors in layers]),
        scores,
    )


def _trained_layer(
    inputs: Sequence[torch.Tensor], peaks: Sequence[torch.Tensor], segment: int, *, seed: int
) -> dict[str, torch.Tensor]:
    """Train one layer.

    Returns:
        The scorer's tensors in float16; losses, float64 [2]; scores of all samples' tokens, float32 [tokens, heads].
    """
    targets = [target(sample, segment) for sample in peaks]
    tensors, losses = train_layer(inputs, targets, [weight(sample) for sample in peaks], seed=seed)
    halves = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    scores = torch.cat([Gate().token_scores(sample, halves) for sample in inputs])
    return halves | {_LOSSES: torch.tensor(losses, dtype=torch.float64), _SCORES: scores.float().contiguous()}


def target(peaks: torch.Tensor, segment: int) -> torch.Tensor:
    """Compute the network's targets: log of the peak attention, centred in each segment.

    Tokens compete within their segment only, and later segments are followed by fewer queries.

    Args:
        peaks: [heads, segments * S].

    Returns:
        float32 [segments * S, heads].
    """
    logs = peaks.float().clamp_min(FLOOR).log().unflatten(-1, (-1, segment))
    return (logs - logs.mean(dim=-1, keepdim=True)).flatten(1).T


def weight(peaks: torch.Tensor) -> torch.Tensor:
    """Compute weights of errors, larger for more attention: float32 [segments * S, heads]."""
    return (peaks.float().clamp_min(FLOOR) ** 0.25).T


def train_layer(
    inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, seed: int
) -> tuple[dict[str, torch.Tensor], tuple[float, float]]:
    """Train one layer's network.

    Args:
        inputs: [tokens, hidden size] per sample.
        targets, weights: [tokens, heads] per sample.

    Returns:
        The scorer's tensors of the layer, and its losses on training and on held-out samples.
    """
    held_out = [number for number in range(len(inputs)) if number % HELD_OUT == HELD_OUT - 1]
    training = [number for number in range(len(inputs)) if number not in held_out]
    x, y, w = (torch.cat([samples[n].float() for n in training]) for samples in (inputs, targets, weights))
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
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate_factor)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator)
        loss = _loss(_predict(parameters, x[batch]), y[batch], w[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    trained = {name: tensor.detach() for name, tensor in parameters.items()}
    losses = []
    for numbers in (training, held_out):
        if not numbers:
            losses.append(float("nan"))
            continue
        x, y, w = (torch.cat([samples[n].float() for n in numbers]) for samples in (inputs, targets, weights))
        losses.append(float(_loss(_predict(trained, (x - mean) * scale), y / spread, w / w.mean(dim=0))))
    tensors = {
        "input_mean": mean[None],
        "input_scale": scale[None],
        "hidden": trained["hidden"][None],
        "hidden_bias": trained["hidden_bias"][None],
        "skip": trained["skip"],
        "output": trained["output"],
    }
    return tensors, (losses[0], losses[1])


def _predict(parameters: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    features = gelu(inputs @ parameters["hidden"].T + parameters["hidden_bias"])
    return inputs @ parameters["skip"].T + features @ parameters["output"].T + parameters["level"]


def _loss(predicted: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights * (predicted - targets).square()).mean()


def _rate_factor(step: int) -> float:
    warmup = STEPS / 10
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + np.cos(np.pi * step / STEPS))
