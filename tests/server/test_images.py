"""Pictures in prompts: against Hugging Face at ratio 1, hit against miss below it, and what two pictures share."""

from __future__ import annotations

import json
import sys

import httpx
import numpy as np
import pytest

from tests.server.client import Answer, ask, found_of, server_settings
from tests.server.test_slab_formats import close
from tests.vision_models import MAKERS, VisionModel, data_url, picture

pytestmark = pytest.mark.server

SEGMENT, NEW = 64, 24
BEFORE = "Here is a picture, and a question about it behind the picture. Please look: "
AFTER = " What do you see, and where is it?" * 4
FAMILIES = [
    pytest.param(name, marks=[] if name == "qwen2.5-vl" else pytest.mark.architecture, id=name) for name in MAKERS
]
"""All that are served with pictures; other models of the kind are refused."""


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request) -> VisionModel:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def folder(vision, tmp_path_factory):
    return vision.save(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def serve(folder, servers):
    """Starts a server on the model at a ratio."""

    def start(ratio: float, *more: str):
        flags = [
            *("--dtype", "float32", "--kv-bytes", "16MiB", "--max-running-requests", "4", "--kv-pool", "ragged"),
            *("--ragged-ratio", str(ratio), "--ragged-segment", str(SEGMENT), *more),
        ]
        return servers.serve(folder, *flags, log=folder.parent / f"{ratio}.log")

    return start


def look(vision: VisionModel, server, seed: int, **options: int) -> Answer:
    """The answer about `picture(seed)`, between the same words each time."""
    prompt = {"text": vision.prompt(BEFORE, AFTER), "image_data": [data_url(picture(seed))]}
    return ask(server, prompt, NEW, **options)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.output_logprobs, expected.output_logprobs, atol=1e-4)


def test_full_ratio_equals_hugging_face(vision, serve):
    """The picture runs over several chunks and segments; the words behind it show what they saw of it."""
    tokens, logprobs, of_text = vision.answer(vision.prompt(BEFORE, AFTER), picture(0), NEW)
    with serve(1, "--chunked-prefill-size", str(SEGMENT)) as server:
        cold, warm = look(vision, server, 0, logprobs_from=0), look(vision, server, 0)
    prompt = len(logprobs) + 1 - NEW
    assert (cold.cached, warm.cached) == (0, found_of(prompt - 1, SEGMENT))
    for answer in (cold, warm):
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.output_logprobs, logprobs[-NEW:], atol=1e-4)
    words = of_text[:-NEW]
    # But for the first ones of all and behind the picture, whose logprobs are those of a step from another token.
    assert words.sum() == len(BEFORE) + len(AFTER) - 2
    np.testing.assert_allclose(cold.input_logprobs[words], logprobs[:-NEW][words], atol=1e-4)


def test_hit_equals_miss_and_pictures_share_nothing(vision, serve):
    with serve(0.3) as server:
        cold, warm, other = look(vision, server, 0), look(vision, server, 0), look(vision, server, 1)
        # SGLang empties its cache here, too, but fails to answer for Mistral 3 (its processor has no cache to empty);
        # `alone` sees whether it was emptied.
        httpx.post(f"{server.url}/flush_cache?timeout=30", timeout=60)
        alone, again = look(vision, server, 1), look(vision, server, 0)
    assert_same(warm, cold)
    assert warm.cached > len(BEFORE) + SEGMENT
    # Another picture in its place: the words before it are shared, nothing of the picture or behind it.
    common = len(BEFORE) // SEGMENT * SEGMENT
    assert [answer.cached for answer in (cold, other, alone, again)] == [0, common, 0, common]
    assert common > 0
    assert_same(other, alone)
    assert_same(again, cold)
    assert np.abs(other.output_logprobs - cold.output_logprobs).max() > 0.1


@pytest.mark.thorough
def test_pictures_in_slabs_of_codes(vision, serve):
    """A code may move by one where chunks move the last bit of a key (docs/slab-formats.md)."""
    with serve(0.1, "--ragged-slab-dtype", "k8v4") as server:
        cold, warm, other = look(vision, server, 0), look(vision, server, 0), look(vision, server, 1)
        assert server_settings(server)["slab_dtype"] == "k8v4"
    assert warm.cached > len(BEFORE) + SEGMENT
    assert other.cached == len(BEFORE) // SEGMENT * SEGMENT
    close([warm], [cold])
    assert np.abs(other.output_logprobs - cold.output_logprobs).max() > 0.1


@pytest.mark.thorough
def test_a_gate_trained_on_text_serves_pictures(tmp_path, servers):
    """Calibration sends text alone; the gate then scores what enters attention at a picture's tokens, too."""
    vision = MAKERS["qwen2.5-vl"]()
    model, profile = vision.save(tmp_path / "model"), tmp_path / "gate.safetensors"
    rng = np.random.default_rng(0)
    samples = [{"task": "ab"[n % 2], "input_ids": rng.integers(16, 512, 200 + 30 * n).tolist()} for n in range(4)]
    data = tmp_path / "samples.jsonl"
    data.write_text("\n".join(map(json.dumps, samples)))
    command = ["-m", "calib", "run", "--model", model, "--dtype", "float32", "--data", data, "--segment", SEGMENT]
    done = servers.run([sys.executable, *map(str, [*command, "--scorer", "gate", "-o", profile])], timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    flags = [
        *("--dtype", "float32", "--kv-bytes", "16MiB", "--max-running-requests", "4", "--kv-pool", "ragged"),
        *("--ragged-ratio", "0.3", "--ragged-segment", str(SEGMENT), "--ragged-profile", str(profile)),
    ]
    with servers.serve(model, *flags, log=tmp_path / "gate.log") as server:
        cold, warm = look(vision, server, 0), look(vision, server, 0)
        assert "scorer gate" in server.log_text()
    assert (cold.cached, warm.cached > len(BEFORE) + SEGMENT) == (0, True)
    assert_same(warm, cold)
