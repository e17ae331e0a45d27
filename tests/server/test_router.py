"""SGLang's router in front of several servers: replicas with conversations of their own, and prefill and decode."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

from benchmarks.harness.client import ServerClient
from benchmarks.harness.launch import Server, free_port, stop
from benchmarks.harness.pools import Pool, server_arguments
from benchmarks.harness.results import Results
from benchmarks.multi_turn.point import points
from benchmarks.recall import MODEL
from tests.server.client import flush, found_of, ragged_metrics, wait_until
from tests.server.pair import serve_decode, serve_prefill
from tests.server.router import healthy, route

pytestmark = [pytest.mark.server, pytest.mark.thorough]
pytest.importorskip("sglang_router", reason="the router is missing: pip install sglang-router")

MULTI_TURN = (sys.executable, "-m", "benchmarks", "multi_turn")

SEGMENT, NEW, CONVERSATIONS = 64, 24, 6
FLAGS = (
    *("--dtype", "float32", "--kv-bytes", "32MiB", "--max-running-requests", "8", "--enable-cache-report"),
    *("--kv-pool", "ragged", "--ragged-ratio", "0.5", "--ragged-segment", str(SEGMENT), "--enable-metrics"),
    *("--decode-log-interval", "1"),
)


@dataclass
class Conversation:
    """messages: so far. tokens, cached: of the last prompt."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0

    def __post_init__(self) -> None:
        # From the first letter on unlike others: such as begin alike are sent to one replica.
        text = f"Keeper of lighthouse {self.number}, answer letters. "
        self.messages.append({"role": "system", "content": 6 * (text[self.number :] + text[: self.number])})

    def turn(self, url: str) -> str:
        self.messages.append({"role": "user", "content": f"Night {len(self.messages)}: how far does lamp reach?"})
        body = {"model": "any", "messages": self.messages, "temperature": 0, "max_tokens": NEW, "ignore_eos": True}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        response.raise_for_status()
        said = response.json()
        self.tokens, details = said["usage"]["prompt_tokens"], said["usage"]["prompt_tokens_details"] or {}
        self.cached = details.get("cached_tokens", 0)
        answer = said["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def replicas(folder, character_model, servers) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(servers.serve(character_model, *FLAGS, log=folder / f"{number}.log"))
            for number in range(2)
        ]


def sealed(server: Server) -> float:
    return ragged_metrics(server)["sealed_segments_total"]


def test_conversations_stay_with_a_replica_and_outlive_it(replicas, folder):
    """Each turn finds what the one before has left. When a replica has died, and the router has seen it, its
    conversations go on with the other, which computes them once; those of the other do not notice."""
    conversations = [Conversation(number) for number in range(CONVERSATIONS)]
    urls = [server.url for server in replicas]
    soon = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
    choice = ("--worker-urls", *urls, "--policy", "cache_aware")
    with route(*choice, *soon, servers=2, log=folder / "router.log") as router:

        def turn() -> list[bool]:
            """The next turn of all conversations at once; which of them have found what the one before has left."""
            before = [one.tokens for one in conversations]
            with ThreadPoolExecutor(CONVERSATIONS) as threads:
                list(threads.map(lambda one: one.turn(router.url), conversations))
            # Behind an answer the template goes on otherwise than at a prompt's end.
            pairs = zip(conversations, before, strict=True)
            return [one.cached >= found_of(tokens, SEGMENT) - SEGMENT for one, tokens in pairs]

        turn()
        assert turn() == turn() == [True] * CONVERSATIONS
        assert all(sealed(server) > 0 for server in replicas), "all went to one replica"
        stop(replicas[0].process)
        wait_until(lambda: healthy(router) == 1)
        found = turn()
        assert 0 < sum(found) < CONVERSATIONS
        assert turn() == [True] * CONVERSATIONS


def test_the_benchmark_of_conversations_adds_replicas_up(folder, servers):
    """Both pools, and what all requests found, in one row."""
    pool = Pool.parse("ragged@0.5")
    flags = server_arguments(pool, 3, "24MiB", on_cpu=True)
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(servers.serve(MODEL, *flags, log=folder / f"benchmark-{number}.log"))
            for number in range(2)
        ]
        urls = [server.url for server in replicas]
        log = folder / "router-benchmark.log"
        router = stack.enter_context(route("--worker-urls", *urls, "--policy", "cache_aware", servers=2, log=log))
        traffic = ["--clients", "3", "--rounds", "3", "--request-length", "150", "--output-length", "6", "--json"]
        traffic += ["--kv-bytes", "24MiB", "--repeats", "1", "--poll-every", "0.2", "--request-rate", "inf"]
        where = ["--url", f"ragged@0.5={','.join([router.url, *urls])}", "--output", str(folder / "out.json")]
        done = servers.run([*MULTI_TURN, *traffic, *where, "--min-load", "0"], timeout=120)
        assert done.returncode == 0, done.stderr
        (point,) = points(Results.load(folder / "out.json", "multi_turn"))
        assert point.virtual_tokens == sum(ServerClient(url).pool_tokens() for url in urls)
    assert point.rejected is None
    assert len(point.answers) == 9
    assert sum(answer.cached for answer in point.answers) > 0


def test_prefill_and_decode_behind_a_router(folder, character_model, servers):
    """A client sees one server, which answers as one does that does both; what is cached, it caches where prompts are
    computed."""
    port = free_port()
    first, second = Conversation(1), Conversation(1)
    with servers.serve(character_model, *FLAGS, log=folder / "together.log") as together:
        expected = [first.turn(together.url) for _ in range(3)]
    with (
        serve_prefill(servers, character_model, *FLAGS, port=port, log=folder / "prefill.log") as prefill,
        serve_decode(servers, character_model, *FLAGS, log=folder / "decode.log") as decode,
        route(
            *("--pd-disaggregation", "--prefill", prefill.url, str(port), "--decode", decode.url),
            servers=2,
            log=folder / "router-apart.log",
        ) as router,
    ):
        assert [second.turn(router.url) for _ in range(3)] == expected
        assert second.cached == first.cached > SEGMENT
        flush(prefill)
