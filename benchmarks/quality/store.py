"""The file of results: settings, and one entry for every configuration and peer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.result_file import ResultFile
from benchmarks.quality.configuration import Configuration


class Results(ResultFile):
    """`served`: what `measured.Measured.result` gave, by configuration; `peers`: kvpress's, by method and share."""

    benchmark = "benchmarks.quality"

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        super().__init__(path, settings, about)
        self.served: dict[Configuration, dict[str, Any]] = {}
        self.peers: dict[tuple[str, float], dict[str, Any]] = {}

    def read_entries(self, document: dict[str, Any]) -> None:
        self.served = {Configuration(**entry["configuration"]): entry["result"] for entry in document["served"]}
        self.peers = {(entry["method"], entry["share"]): entry["result"] for entry in document["peers"]}

    def entries(self) -> dict[str, Any]:
        return {
            "served": [{"configuration": asdict(one), "result": result} for one, result in self.served.items()],
            "peers": [{"method": m, "share": s, "result": result} for (m, s), result in self.peers.items()],
        }

    @property
    def known(self) -> set[Configuration]:
        return set(self.served)

    def add(self, configuration: Configuration, result: dict[str, Any]) -> None:
        """Keep the result of a server; it is on disk when this returns."""
        self.served[configuration] = result
        self.write()

    def add_peer(self, method: str, share: float, result: dict[str, Any]) -> None:
        """Keep the result of a peer; it is on disk when this returns."""
        self.peers[method, share] = result
        self.write()

    @property
    def reference(self) -> Path:
        """The token pool's hidden states, which later runs compare with too."""
        return self.path.with_suffix(".reference.safetensors")

    def keep_reference(self, states: list[torch.Tensor]) -> None:
        """Write the token pool's hidden states of every text, [tokens, hidden size] each."""
        tensors = {str(number): tensor.contiguous() for number, tensor in enumerate(states)}
        save_file(tensors, str(self.reference), {"settings": json.dumps(self.settings, sort_keys=True)})

    def load_reference(self) -> list[torch.Tensor] | None:
        """What `keep_reference` wrote under the same settings; None where there is no such file."""
        if not self.reference.is_file():
            return None
        try:
            with safe_open(str(self.reference), framework="pt") as file:
                if (file.metadata() or {}).get("settings") != json.dumps(self.settings, sort_keys=True):
                    return None
                return [file.get_tensor(str(number)) for number in range(len(file.keys()))]
        except SafetensorError as error:
            raise SettingsError(f"{self.reference} cannot be read ({error}): delete it") from None
