"""What happens to the others when one of two servers dies, is full, or has another plan."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest

from benchmarks.harness.launch import free_port, stop
from benchmarks.recall import MODEL
from tests.server.client import flush, generate, generate_all, ragged_metrics, wait_until
from tests.server.pair import Pair, serve_decode, serve_pair, serve_prefill
from tests.server.test_bounded_history import STRICT
from tests.server.test_disaggregation import SEGMENT, document

pytestmark = [pytest.mark.server, pytest.mark.thorough]

FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4", "--enable-metrics"),
    *("--chunked-prefill-size", "256", "--kv-pool", "ragged", "--ragged-segment", str(SEGMENT)),
)
ENOUGH, RATIO = ("--kv-bytes", "48MiB"), ("--ragged-ratio", "0.3")

SOON = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "5", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20"}
"""SGLang would wait five minutes for another server."""


@pytest.fixture(scope="module")
def together(tmp_path_factory, servers):
    """One process that does both, for what answers ought to be."""
    log = tmp_path_factory.mktemp("together") / "server.log"
    with servers.serve(MODEL, *FLAGS, *ENOUGH, *RATIO, log=log) as server:
        yield server


def test_a_killed_decode_server(tmp_path, servers, together):
    """Amid a prompt, of which chunks have been sent: the client gets an error, no page of the prefill server is lost,
    and it answers the next requests with another decode server."""
    long, short, port = document(7, 6000), document(8, 150), free_port()
    flags = (*FLAGS, *ENOUGH, *RATIO)
    with serve_prefill(servers, MODEL, *flags, port=port, log=tmp_path / "prefill.log", env=STRICT | SOON) as first:
        with serve_decode(servers, MODEL, *flags, log=tmp_path / "decode.log", env=SOON) as second:
            pair = Pair(first, second, port)
            pair.generate(short, 8)
            chunks = first.log_text().count("Prefill batch")
            said, lost = pair.start(long, 8)
            while first.log_text().count("Prefill batch") < chunks + 3:
                time.sleep(0.01)
            stop(second.process)
            assert not said.done(), "the prompt was too short to be interrupted"
            assert said.result(timeout=120).status_code >= 500
            assert isinstance(lost.exception(timeout=10), httpx.TransportError)
        flush(first)
        wait_until(lambda: ragged_metrics(first)["slab_bytes_in_use"] == 0)
        with serve_decode(servers, MODEL, *flags, log=tmp_path / "another.log", env=SOON) as third:
            again = Pair(first, third, port)
            for prompt in (short, long):
                assert again.generate(prompt, 8).tokens == generate(together, prompt, 8).tokens


def test_another_plan_is_refused_in_one_line(tmp_path, servers):
    """The request is, not the server: another prefill server may be fine."""
    with serve_pair(
        servers,
        MODEL,
        *(*FLAGS, *ENOUGH),
        folder=tmp_path,
        prefill=RATIO,
        decode=("--ragged-ratio", "0.5"),
        env=STRICT | SOON,
    ) as pair:
        said, refused = (asked.result(timeout=120) for asked in pair.start(document(9, 150), 8))
        assert said.status_code >= 500
        assert refused.status_code == 500
        assert "start both with the same model, --dtype, --kv-cache-dtype, --ragged-* flags" in refused.text
        lines = [line for line in pair.decode.log_text().splitlines() if "sgl_ragged: " in line]
        assert len(lines) == 1
        for server in (pair.prefill, pair.decode):
            assert "Traceback" not in server.log_text().split("The server is fired up")[1]
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            # Idle, and with all of its pages: SGLang's check of that runs, and ends the server where any is lost.
            flush(server)
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_requests_that_are_retracted_on_the_decode_server(tmp_path, servers, together):
    """A decode server that has too few pages for what it lets in: requests wait in host memory, and go on as they were,
    within segments and on borders."""
    prompts = [document(20 + number, length) for number, length in enumerate((180, 190, 200, 230))]
    expected = generate_all(together, prompts, 200)
    with serve_pair(
        servers,
        MODEL,
        *(*FLAGS, *RATIO),
        folder=tmp_path,
        prefill=ENOUGH,
        decode=("--kv-bytes", "4MiB", "--num-reserved-decode-tokens", "16"),
        env=STRICT | SOON,
    ) as pair:
        found = pair.generate_all(prompts, 200)
        assert "Retract requests" in pair.decode.log_text()
        for have, want in zip(found, expected, strict=True):
            assert have.tokens == want.tokens
            np.testing.assert_allclose(have.output_logprobs, want.output_logprobs, atol=1e-4)


def test_a_request_that_never_fits_the_decode_server(tmp_path, servers):
    """It is answered, and does not wait for ever in front of others."""
    decode = ("--kv-bytes", "3MiB", "--num-reserved-decode-tokens", "1024")
    with serve_pair(
        servers, MODEL, *(*FLAGS, *RATIO), folder=tmp_path, prefill=ENOUGH, decode=decode, env=SOON
    ) as pair:
        said, refused = (asked.result(timeout=120) for asked in pair.start(document(9, 500), 8))
        assert refused.status_code == 400
        assert "needs pages of" in refused.text
        assert said.status_code >= 500
        assert len(pair.generate(document(9, 64), 8).tokens) == 8
