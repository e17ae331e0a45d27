"""What a prefill or decode server is refused for at its start, and what it changes of SGLang's settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.disaggregation import launch as disaggregation
from sgl_ragged.features.disaggregation.launch import FEATURE as DISAGGREGATION
from sgl_ragged.features.disaggregation.roles import ServerRole
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.start import ModelStart


def launch(view: object = None, **given: object) -> ModelStart:
    flags = dict(
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        disaggregation_decode_retraction_backup=None,
        disaggregation_decode_extra_slots=None,
        disaggregation_decode_enable_radix_cache=False,
        disaggregation_decode_enable_offload_kvcache=False,
        disaggregation_decode_host_receive_threshold=1.0,
        disaggregation_decode_allocation_policy="early",
        disaggregation_enable_kv_checksum=False,
        enable_pd_role_switch=False,
        optimistic_prefill_attempts=0,
        dp_size=1,
        enable_hierarchical_cache=False,
    )
    return ModelStart(RaggedOptions(kv_pool="ragged"), SimpleNamespace(**flags | given), view, None, torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"disaggregation_transfer_backend": "mooncake"}, "use --disaggregation-transfer-backend nixl"),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, "drop the flag"),
        ({"disaggregation_decode_extra_slots": 8}, "raise --max-running-requests"),
        ({"disaggregation_decode_enable_radix_cache": True}, "keeps no prefixes"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "has no host tier"),
        ({"disaggregation_decode_host_receive_threshold": 0.5}, "on the device"),
        ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "before pages are sent"),
        ({"disaggregation_enable_kv_checksum": True}, "checksums"),
        ({"enable_pd_role_switch": True}, "roles of servers"),
        ({"optimistic_prefill_attempts": 1}, "optimistic prefill"),
        ({"dp_size": 2}, "start several"),
        ({"enable_hierarchical_cache": True}, "give it to the prefill server"),
    ],
)
def test_what_is_refused_says_why_in_one_line(given, words):
    assert DISAGGREGATION.settle(launch()) == ServerRole("decode")
    with pytest.raises(RaggedConfigError, match=words) as refused:
        DISAGGREGATION.settle(launch(**given))
    assert "\n" not in str(refused.value)


def test_a_prefill_server_may_have_a_host_tier():
    given = {"disaggregation_mode": "prefill", "enable_hierarchical_cache": True}
    assert DISAGGREGATION.settle(launch(**given)) == ServerRole("prefill")


def test_staging_buffers_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    with pytest.raises(RaggedConfigError, match="unset it"):
        DISAGGREGATION.settle(launch())


def test_what_changes_with_it():
    """A decode server counts all of its rows, and keeps what it retracts; on CPUs prefill does not overlap."""
    cpu, cuda = (SimpleNamespace(device=device) for device in ("cpu", "cuda"))
    changed = {"disaggregation_decode_extra_slots": 0, "disaggregation_decode_retraction_backup": "cpu_tensor"}
    assert DISAGGREGATION.sglang_settings(ServerRole("decode"), launch(cpu)) == changed
    none = launch(cuda, disaggregation_decode_retraction_backup="none")
    assert (
        DISAGGREGATION.sglang_settings(ServerRole("decode"), none)["disaggregation_decode_retraction_backup"] == "none"
    )
    assert DISAGGREGATION.sglang_settings(ServerRole("prefill"), launch(cpu)) == {"disable_overlap_schedule": True}
    assert DISAGGREGATION.sglang_settings(ServerRole("prefill"), launch(cuda)) == {}


@pytest.mark.parametrize("scorer", ["snapkv", "tova", "gate", "h2o", "keydiff"])
def test_scorers_that_look_at_last_queries_are_refused(scorer):
    plan = SimpleNamespace(scorer=scorer, segment=256, q_per_kv=4, geometry=SimpleNamespace(head_dim=128))
    if scorer not in ("snapkv", "tova"):
        assert DISAGGREGATION.join(ServerRole("decode"), plan, launch()) == ServerRole("decode")
        return
    with pytest.raises(RaggedConfigError, match="use another --ragged-scorer"):
        DISAGGREGATION.join(ServerRole("decode"), plan, launch())


def test_what_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(disaggregation, "ENGINE", "an_engine_that_nobody_has")
    with pytest.raises(RaggedConfigError, match="install it"):
        DISAGGREGATION.settle(launch())
