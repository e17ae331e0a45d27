"""`sgl-ragged verify` on real servers: what it measures, and when it fails."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sgl_ragged import cli
from sgl_ragged.verify.comparison import compare
from sgl_ragged.verify.prompts import TokenizedPrompt
from sgl_ragged.verify.running_server import RunningServer
from tests.models import make_llama

pytestmark = pytest.mark.server

SEGMENT = 64
COMMON = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "16MiB", "--max-running-requests", "4")
RAGGED = ("--kv-pool", "ragged", "--ragged-profile", "uniform", "--ragged-segment", str(SEGMENT))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def token_url(llama, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("token") / "log"
    with servers.serve(llama, *COMMON, "--kv-pool", "token", log=log) as server:
        yield server.url


@pytest.fixture(scope="module")
def ragged_url(llama, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("ragged") / "log"
    flags = (*RAGGED, "--ragged-ratio", "0.3", "--ragged-slab-dtype", "wide")
    with servers.serve(llama, *COMMON, *flags, log=log) as server:
        yield server.url


def prompts(*lengths: int) -> list[TokenizedPrompt]:
    rng = np.random.default_rng(3)
    return [TokenizedPrompt(str(length), rng.integers(4, 100, length).tolist()) for length in lengths]


def test_a_server_equals_itself(token_url):
    server = RunningServer(token_url)
    (found,) = compare(server, server, prompts(400)).prompts
    assert found.to_reference.positions == 400 - 256 - 1
    for one in (found.to_reference, found.hit_to_miss, found.decode_to_prefill):
        assert abs(one.kl) < 1e-6
        assert one.same_top1 == 1


def test_compression_is_seen_and_hits_equal_misses(ragged_url, token_url):
    found = compare(RunningServer(ragged_url), RunningServer(token_url), prompts(40, 300, 301))
    short, *long = found.prompts
    # Within its first segment nothing is compressed, and no hit is possible.
    assert short.to_reference is None
    assert short.hit_to_miss is None
    for one in long:
        assert one.to_reference.kl > 1e-4
        assert one.to_reference.positions == one.tokens - SEGMENT - 1
        assert abs(one.hit_to_miss.kl) < 1e-6
        assert one.hit_to_miss.positions == one.tokens - 256 - 1
        assert abs(one.decode_to_prefill.kl) < 1e-6
    assert found.cache["kept_bytes_ratio"] == pytest.approx(0.3, abs=0.02)
    assert found.against_cache["tokens"] < found.cache["tokens"]
    mean = found.mean("to_reference")
    assert mean.positions == sum(one.to_reference.positions for one in long)
    assert min(one.to_reference.kl for one in long) <= mean.kl <= max(one.to_reference.kl for one in long)


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["sgl-ragged", "verify", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        message = "" if isinstance(end.code, int) else str(end.code)
    else:
        status, message = 0, ""
    out, err = capsys.readouterr()
    return status, out, err + message


def test_limits_decide_the_exit_status(ragged_url, token_url, monkeypatch, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": one.ids}) for one in prompts(200, 300)))
    arguments = ("--url", ragged_url, "--against", token_url, "--prompts", str(path))
    status, out, err = run(monkeypatch, capsys, *arguments, "--max-kl", "10")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["prompt", "line", "line", "all"]
    status, out, err = run(monkeypatch, capsys, *arguments, "--max-kl", "1e-9", "--json")
    assert status == 1
    found = json.loads(out)
    assert found["mean"]["to_reference"]["kl"] > 1e-9
    assert found["faults"] == [err.removeprefix("sgl-ragged: ").strip()]
    assert "KL to the reference" in err


def test_without_a_reference_a_server_is_compared_with_itself(ragged_url, monkeypatch, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"input_ids": prompts(200)[0].ids}))
    status, out, _ = run(monkeypatch, capsys, "--url", ragged_url, "--prompts", str(path))
    assert status == 0
    assert "No reference: pass --against URL" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--url", "http://127.0.0.1:9", "--max-kl", "-1"), "--max-kl -1.0 must be positive"),
    ],
)
def test_what_cannot_be_asked_is_one_line(monkeypatch, capsys, arguments, line):
    status, _, message = run(monkeypatch, capsys, *arguments)
    assert status == 1
    assert line in message
    assert message.count("\n") == 0
