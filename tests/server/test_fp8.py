"""An FP8 cache on a real server: against the dense-mask oracle on what the cache holds, and hit against miss."""

from __future__ import annotations

import json
import shutil

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer

from benchmarks.recall import MODEL
from sgl_ragged.profiles.profile import profile_kept
from tests.harness import LARGEST
from tests.models import make_profile
from tests.oracle import Oracle
from tests.rounded import mostly_close
from tests.server.client import flush, found_of, generate, generate_all, ragged_metrics, wait_until
from tests.server.test_semantics import document

pytestmark = pytest.mark.server

SEGMENT, RATIO, NEW = 128, 0.3, 40
SCALES = (0.03, 0.05, 0.02, 0.1)
"""Of keys and values in each layer."""


NO_UPDATES = {"weight_updates": 0, "profile_of_first_weights": False, "kv_scales_wait": False}

STATIC = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}


def serve(servers, folder, dtype, *more):
    flags = [
        *("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "40MiB", "--max-running-requests", "9"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors"), "--kv-cache-dtype", dtype),
    ]
    return servers.serve(MODEL, *flags, "--chunked-prefill-size", "512", *more, log=folder / f"{dtype}.log")


def with_scales(folder, scales):
    """A copy of the model with FP8 scales of each layer by compressed-tensors, those of values twice those of keys."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, scale in enumerate(scales):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([scale])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([2 * scale])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    config["quantization_config"] = scheme | {"quantization_status": "compressed", "kv_cache_scheme": STATIC}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scales_file(folder):
    factors = {"0": {str(layer): scale for layer, scale in enumerate(SCALES)}}
    path = folder / "scales.json"
    found = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize("name", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.thorough)])
def test_server_agrees_with_the_oracle_and_a_hit_with_a_miss(servers, tmp_path, name):
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
    scales = SCALES if name == "fp8_e4m3" else (1.0,) * 4
    kept = profile_kept(make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT), RATIO, SEGMENT)

    def stored(layer, x):
        return (x / scales[layer]).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() * scales[layer]

    more = ("--quantization-param-path", str(scales_file(tmp_path))) if name == "fp8_e4m3" else ()
    prompts = [document(seed, length) for seed, length in enumerate((129, 500, 1000))]
    with serve(servers, tmp_path, name, *more) as server:
        cold = []
        for prompt in prompts:
            flush(server)
            cold.append(generate(server, prompt, NEW, logprobs_from=0))
        flush(server)
        generate_all(server, prompts, NEW)
        warm = [generate(server, prompt, NEW) for prompt in prompts]
        log = server.log_text()
    assert [answer.cached for answer in warm] == [found_of(len(prompt) - 1, SEGMENT) for prompt in prompts]
    for have, want in zip(warm, cold, strict=True):
        assert have.tokens == want.tokens
        np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)
    found = np.concatenate([cold[2].input_logprobs, cold[2].output_logprobs])
    sequence = prompts[2] + cold[2].tokens
    wanted = Oracle(str(MODEL), kept, SEGMENT, "keydiff", stored=stored).logprobs(sequence)
    # Where two computations of a key differ in the last bit, they may be rounded to neighbours: a sixteenth apart.
    mostly_close(found, wanted, share=0.9, atol=5e-5, most=3e-2)
    wide = Oracle(str(MODEL), kept, SEGMENT, "keydiff").logprobs(sequence)
    assert np.quantile(np.abs(found - wide), 0.5) > 1e-3, "without rounding the same positions look different"
    assert f"pages of {int(kept.sum()) * 2 * 32 / 2**20:.2f} MiB" in log
    assert f"scales of keys {min(scales):g} to {max(scales):g}" in log


def test_a_checkpoint_with_scales_is_served_in_fp8_without_a_flag(servers, tmp_path):
    """By compressed-tensors: plain weights, and a scale of keys and of values for each layer."""
    model = with_scales(tmp_path / "model", SCALES)
    flags = [
        *("--dtype", "bfloat16", "--skip-tokenizer-init", "--kv-bytes", "20MiB", "--max-running-requests", "2"),
        *("--kv-pool", "ragged", "--ragged-ratio", "0.5", "--ragged-segment", "128"),
    ]
    with servers.serve(model, *flags, log=tmp_path / "log") as server:
        prompt = document(1, 300)
        cold = generate(server, prompt, 8)
        warm = generate(server, prompt, 8)
        log = server.log_text()
    assert (cold.cached, warm.cached) == (0, 299)
    assert warm.tokens == cold.tokens
    assert "KV cache in torch.float8_e4m3fn, scales of keys 0.02 to 0.1, of values 0.04 to 0.2" in log
    assert f"pages of {4 * 8 * 2 * 64 * 32 / 2**20:.2f} MiB" in log


def update(server, model, **more):
    body = {"model_path": str(model), **more}
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def send(server, tensors):
    """A session of updates that brings tensors by shared memory."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        payload = MultiprocessingSerializer.serialize(list(tensors.items()), output_str=True)
        for call, body in (
            ("begin_weight_update", {}),
            ("update_weights_from_tensor", {"serialized_named_tensors": [payload]}),
            ("end_weight_update", {}),
        ):
            answer = httpx.post(f"{server.url}/{call}", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def update_state(server):
    (state,) = httpx.get(f"{server.url}/server_info", timeout=60).json()["internal_states"]
    return state["ragged"]


def test_scales_follow_an_update_of_the_weights(servers, tmp_path):
    """A server that got the second checkpoint at run time answers as one that started with it."""
    make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT)
    first = with_scales(tmp_path / "first", SCALES)
    second = with_scales(tmp_path / "second", [100 * scale for scale in SCALES])
    flags = [
        *("--dtype", "bfloat16", "--skip-tokenizer-init", "--kv-bytes", "20MiB", "--max-running-requests", "2"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT), "--enable-metrics"),
        *("--ragged-profile", str(tmp_path / "profile.safetensors")),
    ]
    prompt = document(1, 300)
    with servers.serve(second, *flags, log=tmp_path / "fresh.log") as server:
        fresh = generate(server, prompt, 8, logprobs_from=0)
        fresh_log = server.log_text()
    with servers.serve(first, *flags, log=tmp_path / "updated.log") as server:
        assert update_state(server) == NO_UPDATES
        before = generate(server, prompt, 8, logprobs_from=0)
        update(server, second)
        after = generate(server, prompt, 8, logprobs_from=0)
        warm = generate(server, prompt, 8)
        assert update_state(server) == {**NO_UPDATES, "weight_updates": 1, "profile_of_first_weights": True}

        # What the cache holds was stored with the scales of the second checkpoint, and is read with these.
        update(server, first, flush_cache=False)
        assert update_state(server) == {"weight_updates": 2, "profile_of_first_weights": True, "kv_scales_wait": True}
        assert ragged_metrics(server)["kv_scales_wait"] == 1
        hit = generate(server, prompt, 8)
        flush(server)
        wait_until(lambda: ragged_metrics(server)["kv_scales_wait"] == 0)
        again = generate(server, prompt, 8, logprobs_from=0)
        metrics, log = ragged_metrics(server), server.log_text()

        # In a session the layers have their new scales at its end, after SGLang has flushed the cache.
        send(server, load_file(second / "model.safetensors"))
        sent = generate(server, prompt, 8, logprobs_from=0)
    np.testing.assert_allclose(sent.input_logprobs, fresh.input_logprobs, atol=1e-4)
    assert "scales of keys 2 to 10, of values 4 to 20" in fresh_log
    np.testing.assert_allclose(after.input_logprobs, fresh.input_logprobs, atol=1e-4)
    assert after.tokens == fresh.tokens
    assert np.abs(before.input_logprobs - fresh.input_logprobs).mean() > 0.01, "scales that make no difference"
    assert warm.cached > 0
    assert hit.cached > 0
    np.testing.assert_allclose(hit.output_logprobs, warm.output_logprobs, atol=1e-4)
    np.testing.assert_allclose(again.input_logprobs, before.input_logprobs, atol=1e-4)
    assert (metrics["weight_updates_total"], metrics["profile_of_first_weights"]) == (2, 1)
    assert log.count("is that of the weights that the server started with") == 1
    assert log.count("call /flush_cache") == 1
