"""Hundreds of random requests from 16 clients on a pool too small for them; SGLang's memory checks stay on."""

from __future__ import annotations

import collections
import random
import threading

import httpx
import pytest

from benchmarks.demo import MODEL
from tests.examples import fewer
from tests.server.client import flush, generate

pytestmark = pytest.mark.server

CLIENTS, REQUESTS, CONTEXT, SEGMENT = 16, fewer(320), 1200, 64
VOCABULARY = range(10, 300)
# SGLang's own accounting after every batch, not only when idle.
ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # Retractions for certain, beside those that the full pool brings.
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "50",
}


class Client:
    """Sends random requests; counts what came back."""

    def __init__(self, url: str, seed: int, trunk: list[int]) -> None:
        self.url, self.random, self.trunk = url, random.Random(seed), trunk
        self.outcomes: collections.Counter[str] = collections.Counter()

    def prompt(self) -> list[int]:
        kind = self.random.random()
        if kind < 0.05:
            return []
        if kind < 0.15:
            return self.random.choices(VOCABULARY, k=self.random.randint(1, 3))
        if kind < 0.22:
            return self.random.choices(VOCABULARY, k=CONTEXT + self.random.randint(0, 50))
        shared = self.trunk[: self.random.randint(0, 700)] if kind < 0.7 else []
        return shared + self.random.choices(VOCABULARY, k=self.random.randint(1, 300))

    def send(self) -> None:
        sampling = {
            "temperature": 1.0,
            "max_new_tokens": 1 if self.random.random() < 0.2 else self.random.randint(2, 60),
            "ignore_eos": self.random.random() < 0.8,
        }
        prompt = self.prompt()
        if 0 < len(prompt) < CONTEXT and self.random.random() < 0.15:
            self._send_and_leave({"input_ids": prompt, "sampling_params": sampling, "stream": True})
            return
        body = {"input_ids": prompt, "sampling_params": sampling}
        status = httpx.post(f"{self.url}/generate", json=body, timeout=300).status_code
        self.outcomes["answered" if status == 200 else f"refused {status}"] += 1

    def _send_and_leave(self, body: dict) -> None:
        """Hang up in the middle of the answer, or before it."""
        after = self.random.randint(0, 5)
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=300) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number >= after:
                    break
        self.outcomes["left"] += 1


def test_random_requests_on_a_small_pool(nursery, tmp_path):
    flags = [
        *("--dtype", "float32", "--skip-tokenizer-init", "--context-length", str(CONTEXT)),
        *("--kv-pool", "ragged", "--ragged-ratio", "0.3", "--ragged-segment", str(SEGMENT)),
        *("--kv-bytes", "8MiB", "--max-running-requests", "7", "--chunked-prefill-size", "256"),
        # Admits more than will fit, so that the pool fills up.
        *("--schedule-conservativeness", "0.05"),
    ]
    trunk = random.Random(0).choices(VOCABULARY, k=700)
    with nursery.serve(MODEL, *flags, log=tmp_path / "stress.log", env=ENV) as server:
        clients = [Client(server.url, seed, trunk) for seed in range(CLIENTS)]
        todo = iter(range(REQUESTS))
        lock = threading.Lock()

        def work(client: Client) -> None:
            while True:
                with lock:
                    if next(todo, None) is None:
                        return
                client.send()

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcomes = sum((client.outcomes for client in clients), collections.Counter())
        print(dict(outcomes))
        assert sum(outcomes.values()) == REQUESTS
        assert set(outcomes) == {"answered", "left", "refused 400"}
        assert outcomes["answered"] > REQUESTS / 2
        # Idle: the check for leaks has run, the cache can be emptied, and then the whole pool can be used at once.
        flush(server)
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()
        whole = min(int(info["max_total_num_tokens"]), CONTEXT) - 70
        answer = generate(server, random.Random(1).choices(VOCABULARY, k=whole), 60)
        assert (answer.cached, len(answer.tokens)) == (0, 60)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        log = server.log_text()
        assert "Testing retraction. #retracted_reqs: 1" in log
        for sign in ("leak", "scheduler hit an exception", "exception in asgi application"):
            assert sign not in log.lower()
