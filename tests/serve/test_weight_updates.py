"""When FP8 scales of updated weights are used, and what operators are told of the rest."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.kv_dtype import KvScales
from sgl_ragged.serve.weight_updates import ServedWeights

OLD, NEW = [KvScales(0.5, 0.5)], [KvScales(2.0, 3.0)]


class Backend:
    """As much of `RaggedAttnBackend` as scales need. `on_layers`: what the model has, or why it cannot be used."""

    def __init__(self, fp8: bool = True) -> None:
        self.store = SimpleNamespace(fp8=fp8, dtype=torch.float8_e4m3fn, kv_scales=OLD)
        self.kv_scales = OLD
        self.on_layers: list[KvScales] | RaggedConfigError = OLD

    def found_scales(self) -> list[KvScales]:
        if isinstance(self.on_layers, RaggedConfigError):
            raise self.on_layers
        return self.on_layers

    def use_scales(self, scales: list[KvScales]) -> None:
        self.kv_scales = self.store.kv_scales = scales


@pytest.fixture
def captures():
    return []


@pytest.fixture
def weights(captures):
    return ServedWeights(Backend(), "budgets", lambda: captures.append(1))


def test_new_scales_wait_until_the_cache_is_empty(weights, captures):
    backend = weights._backend
    backend.on_layers = NEW
    assert weights.read_scales(cache_is_empty=False) is None
    assert (backend.kv_scales, weights.scales_wait, captures) == (OLD, True, [])
    assert weights.readings()["kv_scales_wait", ""] == 1
    assert weights.read_scales(cache_is_empty=True) is None
    assert (backend.kv_scales, weights.scales_wait, captures) == (NEW, False, [1])
    # Graphs are captured for other scales alone.
    weights.read_scales(cache_is_empty=True)
    assert captures == [1]


def test_equal_scales_do_not_wait(weights):
    weights.read_scales(cache_is_empty=False)
    assert not weights.scales_wait


def test_scales_that_cannot_be_used_do_not_end_the_scheduler(weights):
    weights._backend.on_layers = RaggedConfigError("inf is no scale")
    error = weights.read_scales(cache_is_empty=True)
    assert error == "Weights were updated, but FP8 scales stay those of the weights before: inf is no scale"
    assert weights._backend.kv_scales == OLD


def test_a_wide_cache_has_no_scales(captures):
    weights = ServedWeights(Backend(fp8=False), "", lambda: captures.append(1))
    weights._backend.on_layers = NEW
    weights.read_scales(cache_is_empty=True)
    assert (weights._backend.kv_scales, captures) == (OLD, [])


@pytest.mark.parametrize(("derived", "warnings"), [("budgets, fit", 1), ("", 0)])
def test_a_profile_of_the_first_weights_is_reported_once(caplog, derived, warnings):
    weights = ServedWeights(Backend(), derived, lambda: None)
    assert not weights.profile_of_first_weights
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            weights.count_update()
    assert weights.profile_of_first_weights == bool(derived)
    assert weights.readings()["weight_updates", ""] == 3
    assert len(caplog.records) == warnings
