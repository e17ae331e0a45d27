"""One storm: a server under many clients, what must hold afterwards, and its answers beside a quiet server's."""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from benchmarks.harness.errors import ServerFailed, ServerLost
from benchmarks.harness.launch import Server
from benchmarks.harness.server_pool import ServerPool
from benchmarks.storm.features import SEGMENT, Feature, server_settings
from benchmarks.storm.material import Material
from benchmarks.storm.quiet import TOLERANCE, QuietServer
from benchmarks.storm.traffic import VOCABULARY, Survivor, storm
from sgl_ragged.mem_pool.open_pages import OpenPages

IDLE_S, STOPS_S = 30, 60
"""Seconds within which a server without requests must be idle, and gone after SIGTERM."""

SIGNS = ("leak", "scheduler hit an exception", "exception in asgi application", "traceback (most recent call last)")
"""What no log of a server may say, in lower case."""

HARMLESS = re.compile(
    r"post-warmup freeze_gc failed\n.*?(?=\n\[20|\Z)|[^\n]*UserWarning: resource_tracker:[^\n]*", re.DOTALL
)
"""SGLang asks itself over HTTP before it listens, and ends ranks before Python has cleaned up behind them."""

RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


@dataclass(frozen=True)
class Limits:
    """How much is asked: requests at most, seconds after which none is sent any more, survivors that are compared."""

    requests: int
    seconds: float
    compared: int
    seed: int


@dataclass
class Outcome:
    """What became of a storm.

    ends: of requests, by kind. retractions: of the server. cached: prompt tokens from the cache, of all of survivors'.
    alike: survivors that were not compared, since their prompts repeat themselves (`before_ties`).
    compared: survivors beside the quiet server; largest: difference of a log-probability, without ties.
    ties: survivors with another difference, which the quiet server shows, too, when it computes in batches of other
    shapes; largest_tie: theirs.
    inexact: of features that have no bound on differences, why. above: survivors that differ by more than rounding.
    problems: what must not be; empty for a storm that was survived.
    """

    features: tuple[str, ...]
    ends: dict[str, int] = field(default_factory=dict)
    retractions: int = 0
    cached: float = 0.0
    alike: int = 0
    compared: int = 0
    largest: float = 0.0
    ties: int = 0
    largest_tie: float = 0.0
    inexact: tuple[str, ...] = ()
    above: int = 0
    problems: list[str] = field(default_factory=list)
    storm_s: float = 0.0
    wall_s: float = 0.0


def run_storm(
    servers: ServerPool,
    features: Sequence[Feature],
    material: Material,
    limits: Limits,
    log: Path,
    *,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run it, whatever comes of it.

    Args:
        log: of the server; the quiet one's is beside it, `-quiet` behind its name.
        advance: called after each request, and for each survivor that was compared.

    Raises:
        ServerFailed: the server did not start; the quiet one is no server of its own flags either then.
    """
    started = time.monotonic()
    names = {one.name for one in features}
    inexact = tuple(one.inexact for one in features if one.inexact)
    outcome = Outcome(tuple(one.name for one in features), inexact=inexact)
    with tempfile.TemporaryDirectory(prefix="storm-") as pages, contextlib.ExitStack() as stack:
        settings, quiet = (
            server_settings(features, material, Path(pages, kind), quiet=kind == "quiet") for kind in ("storm", "quiet")
        )
        server = stack.enter_context(
            servers.serve(settings.model, *settings.flags, log=log, env=settings.env, launcher=settings.launcher)
        )
        with ThreadPoolExecutor(1) as beside:
            # It starts while the other one is busy.
            calm: Future[Server] = beside.submit(
                stack.enter_context,
                servers.serve(
                    quiet.model,
                    *quiet.flags,
                    log=log.with_stem(f"{log.stem}-quiet"),
                    env=quiet.env,
                    launcher=quiet.launcher,
                ),
            )
            collected = storm(
                server.url,
                requests=limits.requests,
                seconds=limits.seconds,
                seed=limits.seed,
                adapters=settings.adapters,
                # Under overlays, decoding is not what prefill is: only what is decoded can be compared.
                greedy="reservoir" in names,
                # Where one asks for log-probabilities, SGLang decodes in batches of their own.
                asks="mixed-chunk" not in names,
                advance=advance,
            )
        outcome.storm_s = round(time.monotonic() - started, 1)
        outcome.ends = dict(sorted(collected.ends.items()))
        outcome.problems += sorted(set(collected.problems))
        survivors = collected.survivors
        outcome.cached = round(
            sum(one.cached for one in survivors) / max(sum(len(one.prompt) for one in survivors), 1), 3
        )
        outcome.problems += _afterwards(server, settings.adapters)
        outcome.problems += _stop(server)
        outcome.problems += _signs(server)
        outcome.retractions = sum(map(int, RETRACTED.findall(server.log_text())))
        # Beside chunks of prefill there are hardly any steps of decode alone, in which SGLang retracts.
        if not outcome.retractions and "mixed-chunk" not in names:
            outcome.problems.append("nothing was retracted: the storm was none")
        if not survivors:
            outcome.problems.append("no request was answered")
        try:
            segment = next((one.segment for one in features if one.segment), SEGMENT)
            chooses = "ratio-1" not in names
            cut = [before_ties(one, segment) if chooses else one for one in survivors]
            fit = [one for one in cut if one is not None]
            outcome.alike = len(survivors) - len(fit)
            _compare(QuietServer(calm.result().url), fit[: limits.compared], outcome, "reservoir" in names, advance)
        except (ServerLost, ServerFailed) as error:
            outcome.problems.append(str(error).strip().splitlines()[-1])
    outcome.wall_s = round(time.monotonic() - started, 1)
    return outcome


def before_ties(survivor: Survivor, segment: int) -> Survivor | None:
    """Cut an answer off where it depends on a finished segment that repeats itself; None if nothing is left.

    Tokens that repeat themselves get equal scores, and rounding decides which of them are kept. A segment repeats
    itself if fewer than half of its tokens are distinct. Queries after the segment read what is kept of it. The first
    token after it is the answer to the last query of the segment, which reads the segment whole.
    """
    tokens = [*survivor.prompt, *survivor.tokens]
    for end in range(segment, len(tokens) + 1, segment):
        if len(set(tokens[end - segment : end])) < segment // 2:
            count = end + 1 - len(survivor.prompt)
            logprobs = None if survivor.logprobs is None else survivor.logprobs[: max(count, 0)]
            return replace(survivor, tokens=survivor.tokens[:count], logprobs=logprobs) if count > 0 else None
    return survivor


def _afterwards(server: Server, adapters: Sequence[str]) -> list[str]:
    """What does not hold once all clients are gone: idle, empty, and the whole pool at once."""
    problems = []
    try:
        flushed = httpx.post(f"{server.url}/flush_cache?timeout={IDLE_S}", timeout=2 * IDLE_S)
        if flushed.status_code != 200:
            problems.append(f"not idle within {IDLE_S} s after the last request: flush says {flushed.status_code}")
        info = httpx.get(f"{server.url}/server_info", timeout=IDLE_S).json()
        # What is reserved: a page of the prompt, one of the answer, and those of open segments.
        page = int(info["page_size"])
        reserved = 2 + OpenPages(page, info["ragged"]["open_page_tokens"]).transient
        whole = int(info["max_total_num_tokens"]) - 61 - reserved * page
        prompt = random.Random(1).choices(VOCABULARY, k=whole)
        sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=2 * IDLE_S)
        meta = answer.json().get("meta_info", {})
        if (meta.get("completion_tokens"), meta.get("cached_tokens")) != (60, 0):
            problems.append(f"a request of the whole pool, {whole} tokens and 60 new: {answer.text[:200]}")
        health = httpx.get(f"{server.url}/health", timeout=IDLE_S).status_code
        if health != 200:
            problems.append(f"its health is {health}")
    except (httpx.TransportError, ValueError, KeyError) as error:
        problems.append(f"after the storm: {type(error).__name__} {error}")
    return problems


def _stop(server: Server) -> list[str]:
    """Ask the server to end; it and its workers have to be gone in time."""
    try:
        process = psutil.Process(server.process.pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
    except psutil.NoSuchProcess:
        return ["the server has ended by itself"]
    _, alive = psutil.wait_procs(family, timeout=STOPS_S)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    return [f"{len(alive)} of {len(family)} processes still there {STOPS_S} s after SIGTERM"] if alive else []


def _signs(server: Server) -> list[str]:
    lines = HARMLESS.sub("", server.log_text()).splitlines()
    return [
        f"the log says: {line.strip()[:200]}"
        for sign in SIGNS
        for line in [next((line for line in lines if sign in line.lower()), None)]
        if line is not None
    ]


def _compare(
    quiet: QuietServer,
    survivors: Sequence[Survivor],
    outcome: Outcome,
    decoded: bool,
    advance: Callable[[], None],
) -> None:
    """Ask for each survivor's log-probabilities again. Raises ServerLost."""
    far: list[tuple[float, Survivor]] = []
    for survivor in survivors:
        difference = quiet.decoded_difference(survivor) if decoded else quiet.difference(survivor)
        tie = False
        if not difference <= TOLERANCE and not outcome.inexact:
            tie = quiet.nearest(survivor) <= TOLERANCE
        if tie:
            outcome.ties += 1
            outcome.largest_tie = max(outcome.largest_tie, difference)
        else:
            outcome.largest = max(outcome.largest, difference)
            if not difference <= TOLERANCE:
                far.append((difference, survivor))
        outcome.compared += 1
        advance()
    outcome.above = len(far)
    if far and not outcome.inexact:
        difference, worst = max(far, key=lambda one: one[0])
        outcome.problems.append(
            f"{len(far)} of {outcome.compared} answers differ from a quiet server's by up to {difference:.1e}: one of "
            f"{len(worst.prompt)} tokens ({worst.cached} cached, {worst.retractions} retractions), "
            f"{len(worst.tokens)} answered, from token {quiet.begins(worst)} on, adapter {worst.adapter}"
        )
