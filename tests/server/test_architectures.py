"""Model families: ratio 1 against SGLang's own token pool, and below it a hit against a miss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.architectures import PLAIN
from tests.server.client import Answer, flush, generate
from tests.vision_models import make_qwen2_5_vl

pytestmark = pytest.mark.server

SEGMENT, NEW = 32, 24
PROMPT = np.random.default_rng(5).integers(16, 512, 5 * SEGMENT + 7).tolist()

ALWAYS = ("phi3", "qwen3_moe", "glm4", "qwen2.5-vl")
"""Those that differ most: packed projections; experts and norms of queries and keys; half of a key rotated, in pairs,
with biases; M-RoPE. The others run in `make architectures`."""


def _param(name: str, make, blocked: str | None = None):
    marks = [] if name in ALWAYS else [pytest.mark.architecture]
    if blocked is not None:
        marks.append(pytest.mark.skip(reason=f"SGLang: {blocked}"))
    return pytest.param(make, marks=marks, id=name)


SERVED = [
    *(_param(name, family.make, family.blocked) for name, family in PLAIN.items()),
    # Text alone; pictures are in test_images.
    _param("qwen2.5-vl", lambda folder: make_qwen2_5_vl().save(folder)),
]


@pytest.fixture(scope="module", params=SERVED)
def model(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("family") / "model")


@pytest.fixture(scope="module")
def serve(model, nursery):
    """Starts a server on the model with these flags."""

    def start(*flags: str):
        common = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4")
        return nursery.serve(model, *common, *flags, log=model.parent / f"{'-'.join(flags).strip('-')}.log")

    return start


def ragged(ratio: float) -> tuple[str, ...]:
    return "--kv-pool", "ragged", "--ragged-ratio", str(ratio), "--ragged-segment", str(SEGMENT)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.output_logprobs, expected.output_logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def full(serve) -> Answer:
    """What the ragged pool answers at ratio 1."""
    with serve(*ragged(1)) as server:
        return generate(server, PROMPT, NEW, logprobs_from=0)


def test_full_ratio_equals_token_pool(serve, full):
    with serve("--page-size", str(SEGMENT)) as server:
        expected = generate(server, PROMPT, NEW, logprobs_from=0)
    assert_same(full, expected)
    assert len(full.input_logprobs) == len(PROMPT) - 1
    np.testing.assert_allclose(full.input_logprobs, expected.input_logprobs, atol=1e-4)


def test_hit_equals_miss(serve, full):
    """A prompt, its repetition, and a second turn on its answer, which decode has sealed."""
    with serve(*ragged(0.3)) as server:
        cold = generate(server, PROMPT, NEW)
        warm = generate(server, PROMPT, NEW)
        turn = PROMPT + cold.tokens + PROMPT[:SEGMENT]
        second = generate(server, turn, NEW)
        flush(server)
        alone = generate(server, turn, NEW)
        everywhere = generate(server, PROMPT, NEW, logprobs_from=0)
    assert (cold.cached, warm.cached) == (0, len(PROMPT) // SEGMENT * SEGMENT)
    assert (second.cached, alone.cached) == ((len(PROMPT) + NEW - 1) // SEGMENT * SEGMENT, 0)
    assert_same(warm, cold)
    assert_same(second, alone)
    # Compression is at work, and only behind the first segment.
    different = np.abs(everywhere.input_logprobs - full.input_logprobs)
    assert different[: SEGMENT - 1].max() < 1e-4
    assert different.max() > 0.1
