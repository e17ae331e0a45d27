"""Muon: momentum whose update is orthogonalised, for the matrices inside a network (Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon/). In float32, as CPUs without bfloat16 units want it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# Quintic of the post above: drives singular values into about 0.7..1.2 within five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix to ``matrix`` [rows, columns], approximately."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """Every parameter must be a matrix; ``lr`` is the update's spectral norm, times sqrt(rows / columns) where tall."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """One update with Nesterov momentum."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param)).mul_(group["momentum"]).add_(param.grad)
                update = orthogonalise(param.grad + group["momentum"] * mean)
                param.add_(update, alpha=-group["lr"] * max(1.0, param.shape[0] / param.shape[1]) ** 0.5)
