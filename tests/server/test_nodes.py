"""Two launchers with one rank each on 127.0.0.1 (gloo): one server, which ends as one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.errors import ServerFailed
from benchmarks.harness.launch import Server, free_port, stop, wait_until_healthy
from benchmarks.harness.server_pool import ServerPool
from sgl_ragged.profiles.profile import load_profile
from tests.models import with_reference
from tests.server.client import server_settings
from tests.server.unequal_heads import RATIO, SEGMENT, Model, converse, difference_to_oracle, flags, make_model

pytestmark = pytest.mark.server

ENDED = "node {} ({}) has ended, and a model over several nodes needs all of them; so does node {} ({})"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def node_flags(number: int, address: str, mode: str) -> list[str]:
    return [
        *("--nnodes", "2", "--node-rank", str(number), "--dist-init-addr", address, "--ragged-fairkv", mode),
        *("--ragged-slab-dtype", "wide", "--sleep-on-idle"),
    ]


@contextlib.contextmanager
def two_nodes(servers: ServerPool, model: Model, mode: str, folder: Path, *more: str) -> Iterator[list[Server]]:
    """The other node first, and the profile on the first one alone."""
    address, cores = f"127.0.0.1:{free_port()}", sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                servers.start(
                    model.path,
                    *flags(2, RATIO),
                    *node_flags(number, address, mode),
                    *given,
                    *more,
                    log=folder / f"node-{number}.log",
                    env={"SGLANG_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]), "GLOO_SOCKET_IFNAME": "lo"},
                )
            )
            for number, given in ((1, ()), (0, ("--ragged-profile", str(model.profile))))
        ]
        nodes.reverse()
        wait_until_healthy(nodes[0], 120)
        yield nodes


def lines(server: Server) -> list[str]:
    return [line for line in server.log_text().splitlines() if line.startswith("sgl_ragged: ")]


@pytest.mark.parametrize(("mode", "killed"), [("split", 1), pytest.param("permute", 0, marks=pytest.mark.thorough)])
def test_two_nodes_are_one_server(servers, model, tmp_path, mode, killed):
    """Against the dense-mask oracle; and when one of them is killed, the other says so in one line and ends."""
    with two_nodes(servers, model, mode, tmp_path) as nodes:
        said = converse(nodes[0])
        logs = [node.log_text() for node in nodes]
        stop(nodes[killed].process)
        left = nodes[1 - killed]
        left.process.wait(timeout=30)
        told = lines(left)[-1]
    assert difference_to_oracle(model, said) < 1e-4
    for log in logs:
        assert f"heads placed on 2 ranks ({mode})" in log
        assert f"budgets from profile {model.profile}" in log
    host = os.uname().nodename
    assert told == "sgl_ragged: " + ENDED.format(killed, host, 1 - killed, host)
    after = left.log_text().removeprefix(logs[1 - killed])
    assert "Traceback" not in after, after


@pytest.mark.thorough
def test_the_first_node_checks_the_answers(servers, model, tmp_path):
    """With everything kept they pass; beyond the limits the first node ends with its line."""
    profile = load_profile(model.profile)
    strict = ("--ragged-check", "strict", "--ragged-check-seconds", "600")
    with_reference(profile, model.path, model.profile)
    try:
        with two_nodes(servers, model, "permute", tmp_path, *strict, "--ragged-ratio", "1") as nodes:
            found = server_settings(nodes[0])["quality"]
        with pytest.raises(ServerFailed), two_nodes(servers, model, "permute", tmp_path, *strict):
            pass
    finally:
        profile.save(model.profile)
    assert all(abs(found[kind]["kl"]) < 1e-5 for kind in ("to_reference", "hit_to_miss", "decode_to_prefill"))
    log = (tmp_path / "node-0.log").read_text()
    assert "sgl_ragged: --ragged-check strict: KL to the reference is" in log
    assert "Traceback" not in log


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("split", ()),
        ("permute", ()),
        ("permute", ("--ragged-history", str(5 * SEGMENT), "--chunked-prefill-size", str(2 * SEGMENT))),
        ("split", ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")),
    ],
    ids=["split", "permute", "history", "drafts"],
)
def test_two_nodes_equal_one(servers, model, tmp_path, mode, more):
    cores = sorted(os.sched_getaffinity(0))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    profile = ("--ragged-profile", str(model.profile), "--ragged-fairkv", mode)
    with servers.serve(model.path, *flags(2, RATIO), *profile, *more, log=tmp_path / "one.log", env=env) as server:
        one = converse(server, cached=not more)
    with two_nodes(servers, model, mode, tmp_path, *more) as nodes:
        two = converse(nodes[0], cached=not more)
    assert one.tokens == two.tokens
    np.testing.assert_allclose(two.first, one.first, atol=1e-4)
    np.testing.assert_allclose(two.second, one.second, atol=1e-4)
