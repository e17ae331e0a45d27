"""Sends the requests of a workload, each when it is due, and polls the server meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.errors import PointFailed, ServerLost
from benchmarks.multi_turn.client import Answer, Client, Streamed
from benchmarks.multi_turn.gauges import Poller, PoolSize, Sample
from benchmarks.multi_turn.shapes import Request


@dataclass(frozen=True)
class Traffic:
    """How requests arrive. `request_rate` in requests per second, infinite: as soon as a place is free."""

    output_length: int
    max_parallel: int
    request_rate: float
    seed: int


@dataclass(frozen=True)
class Run:
    """Results of a workload.

    Attributes:
        rate_share: time that sending would have taken at the asked rate / time that it took; 1 at an infinite rate.
        duration_s: from the first request to the last answer.
    """

    answers: tuple[Answer, ...]
    samples: tuple[Sample, ...]
    pool: PoolSize
    rate_share: float
    duration_s: float


class _Driver:
    """The state of one run; everything happens in one event loop."""

    def __init__(self, client: Client, requests: Sequence[Request], traffic: Traffic, began: float) -> None:
        self._client, self._requests, self._traffic, self._began = client, requests, traffic, began
        self._rng = np.random.default_rng(traffic.seed)
        self._followers: dict[int | None, list[Request]] = defaultdict(list)
        for request in requests:
            self._followers[request.after].append(request)
        self._ready = self._followers[None]
        self._changed = asyncio.Event()
        self._in_flight = 0
        self._streams: dict[int, Streamed] = {}
        self._shared_done: set[str] = set()
        self.answers: list[Answer] = []
        self.rate_share = 1.0

    def history(self, request: Request) -> list[dict[str, str]]:
        """All messages of the prompt, oldest first."""
        messages = [{"role": role, "content": content} for role, content in request.messages]
        while request.context is not None:
            answer = self._streams[request.context].text
            request = self._requests[request.context]
            before = [{"role": role, "content": content} for role, content in request.messages]
            messages = [*before, {"role": "assistant", "content": answer}, *messages]
        return messages

    async def send_all(self, on_answer: Callable[[], None]) -> None:
        """Return when every request was answered."""
        sent, planned_s, asleep_s = 0, 0.0, 0.0
        first_s = last_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while sent < len(self._requests):
                while not self._ready or self._in_flight >= self._traffic.max_parallel:
                    self._changed.clear()
                    await self._changed.wait()
                # Which of the waiting clients comes next is drawn, as in SGLang's benchmark.
                request = self._ready.pop(int(self._rng.integers(len(self._ready))))
                self._in_flight += 1
                sent += 1
                last_s, planned_s = time.perf_counter(), planned_s + asleep_s
                tasks.create_task(self._serve(request, on_answer))
                if math.isfinite(self._traffic.request_rate):
                    asleep_s = float(self._rng.exponential(1 / self._traffic.request_rate))
                    await asyncio.sleep(asleep_s)
        if math.isfinite(self._traffic.request_rate) and last_s > first_s:
            self.rate_share = min(1.0, planned_s / (last_s - first_s))

    async def _serve(self, request: Request, on_answer: Callable[[], None]) -> None:
        reusable = 0
        if request.context is not None:
            reusable = self._streams[request.context].prompt + self._streams[request.context].output
        elif request.shared in self._shared_done:
            reusable = request.shared_tokens
        sent_s = time.perf_counter() - self._began
        stream = await self._client.ask(self.history(request), self._traffic.output_length)
        if request.context is not None and stream.prompt < reusable:
            raise PointFailed(
                f"a prompt of {stream.prompt} tokens cannot hold the {reusable} tokens of the turns before it: "
                "the text of answers is not tokenized to the same tokens again"
            )
        words = stream.text.split()
        right = None if request.answer is None else words[:1] == [request.answer]
        self.answers.append(
            Answer(
                number=request.number,
                client=request.client,
                round=request.round,
                sent_s=round(sent_s, 4),
                ttft_s=round(stream.ttft_s, 4),
                latency_s=round(stream.latency_s, 4),
                itl_ms=stream.itl_ms,
                prompt=stream.prompt,
                cached=stream.cached,
                output=stream.output,
                reusable=reusable,
                right=right,
            )
        )
        self._streams[request.number] = stream
        if request.shared is not None:
            self._shared_done.add(request.shared)
        self._ready += self._followers[request.number]
        self._in_flight -= 1
        self._changed.set()
        on_answer()


def run(
    url: str,
    model: str,
    requests: Sequence[Request],
    traffic: Traffic,
    *,
    poll_every_s: float,
    polled: Sequence[str] = (),
    on_answer: Callable[[], None] = lambda: None,
) -> Run:
    """Drive the whole workload through the server at `url`.

    Args:
        polled: addresses of the servers whose pools are counted, where that is a router.

    Raises:
        ServerLost: the server went away.
        PointFailed: a request was not served as asked.
    """
    return asyncio.run(_run(url, model, requests, traffic, poll_every_s, polled or (url,), on_answer))


async def _run(
    url: str,
    model: str,
    requests: Sequence[Request],
    traffic: Traffic,
    poll_every_s: float,
    polled: Sequence[str],
    on_answer: Callable[[], None],
) -> Run:
    client = Client(url, model)
    began = time.perf_counter()
    driver = _Driver(client, requests, traffic, began)
    poller = Poller(polled, began, poll_every_s)
    try:
        size = await poller.start()
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(poller.run())
            await driver.send_all(on_answer)
            polling.cancel()
        await poller.take()
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        await client.close()
        await poller.close()
    answers = tuple(sorted(driver.answers, key=lambda answer: answer.number))
    first_s = min(answer.sent_s for answer in answers)
    duration_s = max(answer.sent_s + answer.latency_s for answer in answers) - first_s
    return Run(answers, tuple(poller.samples), size, driver.rate_share, duration_s)


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that broke a task group; a lost server rather than the requests that failed because of it."""
    lost = group.subgroup(ServerLost)
    error = (lost or group).exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
