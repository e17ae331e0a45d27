"""Fingerprints of models: equal for equal geometry and RoPE, wherever a configuration states them."""

from __future__ import annotations

from sgl_ragged.profiles.fingerprint import config_fingerprint
from tests.mem_pool.test_core import CONFIG


def test_fingerprint_tells_kinds_of_rope_apart():
    scaled = CONFIG | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert config_fingerprint(scaled) != config_fingerprint(CONFIG)
    assert config_fingerprint(CONFIG | {"rope_scaling": None}) == config_fingerprint(CONFIG)


def test_fingerprint_reads_both_places_of_rope_theta():
    nested = {k: v for k, v in CONFIG.items() if k != "rope_theta"} | {"rope_parameters": {"rope_theta": 500000}}
    assert config_fingerprint(nested) == config_fingerprint(CONFIG)
