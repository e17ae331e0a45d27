"""Model families: ratio 1 against SGLang's own token pool, and below it a hit against a miss.

What SGLang's token pool does not serve on CPUs is compared with Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from sgl_ragged.profiles.geometry import ModelGeometry
from tests.architectures import PLAIN, WINDOWED, Family
from tests.oracle import Oracle
from tests.server.client import Answer, flush, found_of, generate
from tests.vision_models import make_qwen2_5_vl

pytestmark = pytest.mark.server

SEGMENT, NEW = 32, 24
PROMPT = np.random.default_rng(5).integers(16, 512, 5 * SEGMENT + 7).tolist()

ALWAYS = ("qwen3_moe", "glm4")
"""Models that differ most: experts and norms of queries and keys; half of a key rotated, in pairs, with biases. Models
with windows, and with M-RoPE, have tests of their own. The others run in `make architectures`."""


@dataclass(frozen=True)
class Case:
    """make: saves the model in a folder. served: whether SGLang's token pool serves it here."""

    make: Callable[[Path], Path]
    served: bool = True


def _param(name: str, case: Case, *marks: pytest.MarkDecorator):
    return pytest.param(case, marks=[*marks, *([] if name in ALWAYS else [pytest.mark.architecture])], id=name)


def _skipped(family: Family) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=f"SGLang: {family.blocked}")] if family.blocked else []


CASES = [
    *(_param(name, Case(family.make), *_skipped(family)) for name, family in PLAIN.items()),
    *(_param(name, Case(family.make, family.blocked is None)) for name, family in WINDOWED.items()),
    # Text alone; pictures are in test_images.
    _param("qwen2.5-vl", Case(lambda folder: make_qwen2_5_vl().save(folder))),
]


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory) -> Path:
    return case.make(tmp_path_factory.mktemp("family") / "model")


@pytest.fixture(scope="module")
def serve(model, servers):
    """Starts a server on the model with these flags."""

    def start(*flags: str):
        common = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4")
        # What SGLang takes by itself for experts of gpt-oss needs a GPU.
        common += ("--moe-runner-backend", "triton", "--chunked-prefill-size", str(3 * SEGMENT))
        return servers.serve(model, *common, *flags, log=model.parent / f"{'-'.join(flags).strip('-')}.log")

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


def test_full_ratio_is_the_model(case, model, serve, full):
    assert len(full.input_logprobs) == len(PROMPT) - 1
    if not case.served:
        geometry = ModelGeometry.from_config(AutoConfig.from_pretrained(model).to_dict(), "model")
        kept = np.full((geometry.num_layers, geometry.num_heads), SEGMENT)
        dense = Oracle(str(model), kept, SEGMENT, "keydiff").logprobs(PROMPT + full.tokens)
        np.testing.assert_allclose(np.concatenate([full.input_logprobs, full.output_logprobs]), dense, atol=1e-3)
        return
    with serve("--page-size", str(SEGMENT)) as server:
        expected = generate(server, PROMPT, NEW, logprobs_from=0)
    assert_same(full, expected)
    np.testing.assert_allclose(full.input_logprobs, expected.input_logprobs, atol=1e-4)


def test_hit_equals_miss(serve, full):
    """A prompt, its repetition, and a second turn on its answer, which decode has sealed."""
    with serve(*ragged(0.5)) as server:
        cold = generate(server, PROMPT, NEW)
        warm = generate(server, PROMPT, NEW)
        turn = PROMPT + cold.tokens + PROMPT[:SEGMENT]
        second = generate(server, turn, NEW)
        flush(server)
        alone = generate(server, turn, NEW)
        everywhere = generate(server, PROMPT, NEW, logprobs_from=0)
    assert (cold.cached, warm.cached) == (0, found_of(len(PROMPT) - 1, SEGMENT))
    assert (second.cached, alone.cached) == (found_of(len(PROMPT) + NEW - 1, SEGMENT), 0)
    assert_same(warm, cold)
    assert_same(second, alone)
    # Compression is at work, and only behind the first segment.
    different = np.abs(everywhere.input_logprobs - full.input_logprobs)
    assert different[: SEGMENT - 1].max() < 1e-4
    assert different.max() > 0.05
