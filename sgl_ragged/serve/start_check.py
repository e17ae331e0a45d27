"""Compare a server's answers with the uncompressed model's before it reports healthy.

It runs as one of SGLang's custom warm-ups, in the process with the tokenizer manager, before the HTTP server listens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sgl_ragged.launch.plan import WARM_UP, StartCheck
from sgl_ragged.serve.metrics import PREFIX
from sgl_ragged.verify.comparison import DECODED, Comparison, compare
from sgl_ragged.verify.limits import limits_exceeded
from sgl_ragged.verify.profile_reference import ProfileReference
from sgl_ragged.verify.prompts import TokenizedPrompt
from sgl_ragged.verify.server import Server

logger = logging.getLogger(__name__)

MOST_TEXTS = 2

TIMES_READ = 2.5
"""Prefills of a text that its comparison takes, decoded tokens and cache hits included."""

GAUGES = {
    "check_kl": ("to_reference", "Mean KL to the uncompressed model at the start, nats."),
    "check_hit_kl": ("hit_to_miss", "Mean KL of cache hits to misses at the start, nats."),
    "check_decode_kl": ("decode_to_prefill", "Mean KL of decode to prefill at the start, nats."),
}


class StartingServer(Server):
    """The server of this process, before it listens.

    Args:
        manager: SGLang's tokenizer manager. loop: the event loop that it runs in; methods are called in other threads.
        facts: the scheduler's report that it is ready, which /server_info shows.
    """

    url = "this server"

    def __init__(self, manager: Any, loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
        self._manager, self._loop, self._facts = manager, loop, facts

    def info(self) -> dict[str, Any]:
        return {"dp_size": self._manager.server_args.dp_size, **self._facts}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def ask() -> dict[str, Any]:
            return await anext(self._manager.generate_request(GenerateReqInput(**body), None))

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result()


@dataclass(frozen=True)
class Outcome:
    """Result of the check: a comparison and the seconds it took, or why there is none."""

    found: Comparison | None
    seconds: float = 0.0
    skipped: str = ""

    @property
    def faults(self) -> list[str]:
        return [] if self.found is None else limits_exceeded(self.found)

    def as_json(self) -> dict[str, Any]:
        """Return `quality` of /server_info."""
        if self.found is None:
            return {"skipped": self.skipped}
        means = {kind: self.found.mean(kind) for kind, _ in GAUGES.values()}
        return {
            "texts": [one.name for one in self.found.prompts],
            "seconds": round(self.seconds, 2),
            "faults": self.faults,
            **{kind: None if mean is None else asdict(mean) for kind, mean in means.items()},
        }

    def __str__(self) -> str:
        """Return the line for the log."""
        if self.found is None:
            return f"answers were not compared with the uncompressed model: {self.skipped}"
        parts = [
            f"{name} {mean.kl:.2g}"
            for kind, name in (
                ("to_reference", "KL to the uncompressed model"),
                ("hit_to_miss", "of cache hits to misses"),
                ("decode_to_prefill", "of decode to prefill"),
            )
            if (mean := self.found.mean(kind)) is not None
        ]
        reference = self.found.mean("to_reference")
        same = "" if reference is None else f"; same top-1 token {reference.same_top1:.3f}"
        texts = ", ".join(one.name for one in self.found.prompts)
        return f"answers checked in {self.seconds:.1f} s on {texts}: {', '.join(parts)} nats{same}"


def check_answers(server: Server, check: StartCheck, max_tokens: int) -> Outcome:
    """Compare with the profile's reference on as many texts as the time allows.

    Args:
        max_tokens: longest prompt that the server takes.
    """
    reference = ProfileReference.from_file(check.profile)
    server.likeliest = reference.likeliest
    prompts = [one for one in reference.prompts if len(one.ids) + DECODED < max_tokens][:MOST_TEXTS]
    if not prompts:
        return Outcome(None, skipped=f"texts are longer than {max_tokens} tokens, the longest prompt that it takes")
    per_token = _seconds_per_token(server, prompts[0].ids[: reference.segment])
    fitting = _fitting(prompts, per_token, check.seconds)
    if not fitting:
        expected = TIMES_READ * per_token * len(prompts[0].ids)
        return Outcome(
            None, skipped=f"a text would take about {expected:.0f} s, --ragged-check-seconds is {check.seconds:g}"
        )
    began = time.monotonic()
    found = compare(server, reference, fitting)
    return Outcome(found, time.monotonic() - began)


def _seconds_per_token(server: Server, ids: Sequence[int]) -> float:
    """Measure prefill; the first call may compile."""
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        server.read(ids)
        seconds.append(time.monotonic() - began)
    return min(seconds) / len(ids)


def _fitting(prompts: Sequence[TokenizedPrompt], per_token: float, seconds: float) -> list[TokenizedPrompt]:
    """Return the first prompts that can be compared within some seconds."""
    found: list[TokenizedPrompt] = []
    for prompt in prompts:
        seconds -= TIMES_READ * per_token * len(prompt.ids)
        if seconds < 0:
            break
        found.append(prompt)
    return found


def install(check: StartCheck | str) -> None:
    """Register the check among SGLang's warm-ups in this process; log why there is none."""
    if isinstance(check, str):
        logger.info("%s", Outcome(None, skipped=check))
        return
    from sglang.srt.entrypoints.warmup import warmup

    async def run(disaggregation_mode: str, manager: Any) -> None:
        from sglang.srt.entrypoints.http_server import get_global_state

        facts = get_global_state().scheduler_info
        server = StartingServer(manager, asyncio.get_running_loop(), facts)
        outcome = await asyncio.to_thread(check_answers, server, check, manager.max_req_input_len)
        # Its texts would stay as cached prefixes that no request shares.
        await manager.flush_cache()
        facts["ragged"]["quality"] = outcome.as_json()
        _report(outcome, check, manager)

    warmup(WARM_UP)(run)


def _report(outcome: Outcome, check: StartCheck, manager: Any) -> None:
    faults, advice = "; ".join(outcome.faults), "serve with a higher --ragged-ratio, or calibrate again"
    if check.required and outcome.skipped:
        faults, advice = f"answers were not compared: {outcome.skipped}", "use --ragged-check auto"
    if outcome.found is not None and manager.enable_metrics:
        _write_gauges(outcome.found, manager.served_model_name)
    if not faults:
        logger.info("%s", outcome)
        return
    if check.strict:
        from sglang.srt.utils import kill_process_tree

        print(f"sgl_ragged: --ragged-check strict: {faults}; {advice}", file=sys.stderr, flush=True)
        kill_process_tree(os.getpid(), include_parent=False)
        # An exception would be answered with tracebacks of SGLang's processes. Nothing has been served yet.
        os._exit(1)
    logger.warning("%s", outcome)
    logger.warning("ANSWERS OF THIS SERVER ARE FAR FROM THE UNCOMPRESSED MODEL'S: %s; %s", faults, advice)


def _write_gauges(found: Comparison, model: str) -> None:
    from prometheus_client import Gauge

    for name, (kind, text) in GAUGES.items():
        mean = found.mean(kind)
        if mean is not None:
            gauge = Gauge(PREFIX + name, text, ("model_name",), multiprocess_mode="mostrecent")
            gauge.labels(model_name=model).set(mean.kl)
