"""rho < 1 on a real server: against the dense-mask oracle, hit against miss, and what the radix tree shares."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.harness.launch import SGLANG_SERVE, serve
from benchmarks.recall import MODEL, task
from sgl_ragged.profiles.profile import profile_kept
from tests.models import make_profile
from tests.oracle import Oracle
from tests.server.client import flush, found_of, generate, generate_all

pytestmark = pytest.mark.server

SEGMENT, RATIO, NEW = 128, 0.3, 40


def document(seed: int, length: int) -> list[int]:
    return task.document(np.random.default_rng(seed), length, "chat").tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("semantics")


@pytest.fixture(scope="module")
def profile(folder):
    return make_profile(MODEL, folder / "profile.safetensors", segment=SEGMENT)


@pytest.fixture(scope="module")
def flags(folder, profile):
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "160MiB", "--max-running-requests", "9"),
        *("--sleep-on-idle", "--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors")),
    ]


@pytest.fixture(scope="module")
def server(folder, flags, servers):
    with servers.serve(MODEL, *flags, "--chunked-prefill-size", "2048", log=folder / "2048.log") as server:
        yield server


@pytest.fixture(scope="module")
def prompts():
    """Eight prompts around segment borders; greedy answers cross borders too."""
    lengths = (1, 100, 127, 128, 129, 500, 1000, 1400)
    return [document(seed, max(length, 64))[:length] for seed, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def cold(server, prompts):
    """Answers one at a time, each with an empty cache."""
    answers = []
    for prompt in prompts:
        flush(server)
        answers.append(generate(server, prompt, NEW, logprobs_from=0))
        assert answers[-1].cached == 0
    return answers


def assert_same(found, expected):
    for have, want in zip(found, expected, strict=True):
        assert have.tokens == want.tokens
        np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)
        if len(have.input_logprobs) == len(want.input_logprobs):
            np.testing.assert_allclose(have.input_logprobs, want.input_logprobs, atol=1e-4)


def test_server_agrees_with_the_oracle(server, profile):
    """Log-probabilities at every position of a 2,000-token prompt and of 100 decoded tokens."""
    kept = profile_kept(profile, RATIO, SEGMENT)
    assert kept.max() >= 4 * kept.min()
    prompt = document(100, 2000)
    answer = generate(server, prompt, 100, logprobs_from=0)
    found = np.concatenate([answer.input_logprobs, answer.output_logprobs])
    sequence = prompt + answer.tokens
    expected = Oracle(str(MODEL), kept, SEGMENT, "keydiff").logprobs(sequence)
    assert len(found) == len(expected) == 2099
    np.testing.assert_allclose(found, expected, atol=1e-3)
    # The budgets matter: without them the same positions look different.
    full = Oracle(str(MODEL), np.full_like(kept, SEGMENT), SEGMENT, "keydiff").logprobs(sequence)
    assert np.abs(found - full).max() > 0.1


def test_start_up_line(server, profile):
    kept = profile_kept(profile, RATIO, SEGMENT)
    slab_bytes = int(kept.sum()) * 2 * 32 * 4
    log = server.log_text()
    assert f"{int(kept.min())}/" in log
    assert f"pages of {slab_bytes / 2**20:.2f} MiB" in log
    assert f"(mean share {kept.mean() / SEGMENT:.4f}); ratio {RATIO:g}, scorer " in log
    assert f"digest {profile.digest()}" in log


def test_warm_cache_equals_cold(server, prompts, cold):
    flush(server)
    generate_all(server, prompts, NEW)
    warm = [generate(server, prompt, NEW) for prompt in prompts]
    for prompt, answer in zip(prompts, warm, strict=True):
        border, rest = divmod(len(prompt) - 1, SEGMENT)
        if rest < SEGMENT - 2:
            assert answer.cached == len(prompt) - 1
        else:
            # What ends with its segment leaves nothing open, nor does what lacks one token that is on its way already;
            # behind the border before, other prompts may begin alike.
            assert border * SEGMENT <= answer.cached < len(prompt)
    assert_same(warm, cold)


def test_batch_of_eight_equals_alone(server, prompts, cold):
    flush(server)
    assert_same(generate_all(server, prompts, NEW, logprobs_from=0), cold)


def test_prefixes_share_whole_segments(server):
    """A common prefix is served up to its last whole segment, a prompt that diverges inside a sealed one up to its
    start."""
    flush(server)
    base = document(7, 700)
    generate(server, base, 1)
    common = 300
    other = base[:common] + document(8, 400)
    assert generate(server, other, 1).cached == common // SEGMENT * SEGMENT
    inside = base[: 4 * SEGMENT + 50] + document(9, 200)
    assert generate(server, inside, 1).cached == 4 * SEGMENT
    assert generate(server, base + document(10, 50), 1).cached == 700


def test_answers_extend_the_shared_prefix(server):
    """Segments that decode filled are shared like those of the prompt (multi-turn)."""
    flush(server)
    prompt = document(11, 200)
    answer = generate(server, prompt, 80)
    turn = prompt + answer.tokens + document(12, 60)
    follow = generate(server, turn, 8)
    # The last answered token has no keys yet when the request ends.
    assert follow.cached == found_of(len(prompt) + 79, SEGMENT)
    flush(server)
    assert_same([generate(server, turn, 8)], [follow])


def test_without_radix_cache_and_with_retraction_through_sglang_serve(request, servers, folder, flags, prompts, cold):
    more = ["--disable-radix-cache", "--chunked-prefill-size", "256"]
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
    start = serve if request.config.getoption("thorough") else servers.serve
    with start(MODEL, *flags, *more, log=folder / "serve.log", launcher=SGLANG_SERVE, env=env) as other:
        # One alone is never retracted: this is the plain server without a radix cache.
        assert_same([generate(other, prompt, NEW) for prompt in prompts[-2:]], cold[-2:])
        assert "Testing retraction. #retracted_reqs: 1" not in other.log_text()
        assert_same(generate_all(other, prompts, NEW), cold)
        assert "Testing retraction. #retracted_reqs: 1" in other.log_text()


ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    request = json.loads(open(sys.argv[1]).read())
    if "flags" in request:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        engine = sglang.Engine(server_args=prepare_server_args(request["flags"]))
    else:
        engine = sglang.Engine(**request["engine"])
    sampling = {"temperature": 0, "max_new_tokens": request["new"], "ignore_eos": True}
    outputs = engine.generate(input_ids=request["prompts"], sampling_params=sampling, return_logprob=True)
    print("RESULT " + json.dumps([output["meta_info"]["output_token_logprobs"] for output in outputs]))
    print("SETTINGS " + json.dumps(engine.get_server_info()["ragged"]))
    engine.shutdown()
"""


@pytest.mark.parametrize("by", ["keywords", pytest.param("flags", marks=pytest.mark.thorough)])
def test_engine_gives_the_same(request, servers, folder, flags, prompts, cold, by):
    """`sglang.Engine(kv_pool="ragged", ...)`, or with `ServerArgs` made from flags, in a script of its own as a user
    would write it; chunks of 512."""
    script = folder / "engine.py"
    script.write_text(ENGINE)
    engine = dict(
        model_path=str(MODEL),
        dtype="float32",
        skip_tokenizer_init=True,
        kv_bytes="160MiB",
        max_running_requests=9,
        chunked_prefill_size=512,
        kv_pool="ragged",
        ragged_ratio=RATIO,
        ragged_segment=SEGMENT,
        ragged_slab_dtype="wide",
        ragged_profile=str(folder / "profile.safetensors"),
    )
    more = ["--model-path", str(MODEL), "--chunked-prefill-size", "512", "--ragged-slab-dtype", "wide"]
    asked = {"engine": engine} if by == "keywords" else {"flags": [*flags, *more]}
    wanted = folder / "engine.json"
    wanted.write_text(json.dumps(asked | {"new": NEW, "prompts": prompts}))
    command = [sys.executable, str(script), str(wanted)]
    if request.config.getoption("thorough"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    else:
        done = servers.run(command, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    for found, want in zip(json.loads(lines[0].removeprefix("RESULT ")), cold, strict=True):
        assert [entry[1] for entry in found] == want.tokens
        np.testing.assert_allclose([entry[0] for entry in found], want.output_logprobs, atol=1e-4)
    settings = [line for line in done.stdout.splitlines() if line.startswith("SETTINGS ")]
    assert json.loads(settings[0].removeprefix("SETTINGS "))["ratio"] == RATIO
