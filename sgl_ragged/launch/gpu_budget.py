"""Estimate the KV budget of a GPU that is not there, for `sgl-ragged layout --gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_ragged.errors import RaggedConfigError

GIB, MIB = 2**30, 2**20

CHUNKS = ((35, 2048), (60, 4096), (160, 8192))
"""SGLang's default `--chunked-prefill-size` on GPUs with less than these GiB; 16,384 on larger ones."""

LARGE_GIB, LARGE_RESERVE = 60, 10 * GIB
"""From this size on SGLang leaves at least this much for activations and CUDA graphs."""


@dataclass(frozen=True)
class GpuBudget:
    """An estimate for one GPU, in bytes.

    reserved: for activations and CUDA graphs, as by SGLang's default `--mem-fraction-static`. weights: this rank's. kv:
    what remains.
    """

    gpu: int
    reserved: int
    weights: int

    @property
    def kv(self) -> int:
        return self.gpu - self.reserved - self.weights

    def __str__(self) -> str:
        gpu, kv, weights, reserved = (
            f"{size / GIB:.1f} GiB" for size in (self.gpu, self.kv, self.weights, self.reserved)
        )
        spent = f"{weights} of weights, {reserved} for activations and graphs"
        return f"estimate for {gpu} of GPU memory: {kv} for KV, {spent}"


def estimate_budget(gpu_bytes: int, model: Any, ranks: int) -> GpuBudget:
    """Estimate the KV budget of each rank.

    Args:
        gpu_bytes: memory of the GPU.
        model: SGLang's ModelConfig; weights have its dtype, and are not loaded.
        ranks: tensor-parallel ranks x pipeline stages; weights are divided by them.

    Raises:
        RaggedConfigError: parameters cannot be counted, or nothing is left for a KV cache.
    """
    chunk = next((chunk for limit, chunk in CHUNKS if gpu_bytes < limit * GIB), 16384)
    reserved = int((512 + 1.5 * chunk + 128 * ranks) * MIB)
    if gpu_bytes > LARGE_GIB * GIB:
        reserved = max(reserved, LARGE_RESERVE)
    budget = GpuBudget(gpu_bytes, reserved, parameters(model) * model.dtype.itemsize // ranks)
    if budget.kv <= 0:
        raise RaggedConfigError(f"--gpu holds no KV cache ({budget}); raise --gpu, or --tp-size")
    return budget


def parameters(model: Any) -> int:
    """Return the number of a model's parameters, counted without memory for them."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(model.hf_config)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise RaggedConfigError(f"--gpu cannot count the parameters of {model.model_path}; give --kv-bytes") from error
    return sum(one.numel() for one in made.parameters())
