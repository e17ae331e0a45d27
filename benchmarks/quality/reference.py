"""The token pool's hidden states, stored next to the results: later runs compare with them, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.results import Results


def path_of(results: Results) -> Path:
    return results.path.with_suffix(".reference.safetensors")


def keep(results: Results, states: Sequence[torch.Tensor]) -> None:
    """Write the hidden states of every text, [tokens, hidden size] each."""
    tensors = {str(number): tensor.contiguous() for number, tensor in enumerate(states)}
    save_file(tensors, str(path_of(results)), {"settings": json.dumps(results.settings, sort_keys=True)})


def load(results: Results) -> list[torch.Tensor] | None:
    """Read the states that `keep` wrote under the same settings; None if there is no such file."""
    path = path_of(results)
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            if (file.metadata() or {}).get("settings") != json.dumps(results.settings, sort_keys=True):
                return None
            return [file.get_tensor(str(number)) for number in range(len(file.keys()))]
    except SafetensorError as error:
        raise SettingsError(f"{path} cannot be read ({error}): delete it") from None
