"""Gives the peers (`peers.py`, in their own environment) the same texts and questions as the servers."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.results import Results
from benchmarks.quality.facts import KINDS, is_right
from benchmarks.quality.measured import Tasks
from benchmarks.quality.served import ANSWER_TOKENS
from benchmarks.quality.table import peers as known_peers

SCRIPT = Path(__file__).with_name("peers.py")

METHODS = (
    *("KeyDiff", "SnapKV", "ExpectedAttention", "AdaKV + SnapKV", "AdaKV + ExpectedAttention"),
    *("KVzip", "KVzip+", "AdaKV + Compactor", "Merging + SnapKV"),
)
"""The methods in `peers.py`; none of them sees the question when it compresses."""


class PeersFailed(BenchmarkError):
    """The peers' environment is missing or its program failed."""


def ask_peers(
    python: Path,
    model: str,
    tasks: Tasks,
    tokenizer: Any,
    ratios: Sequence[float],
    results: Results,
    progress: Progress,
) -> None:
    """Measure the peers at the shares that the ratios leave, and add each result as soon as it is there.

    Raises:
        PeersFailed: what was measured before is in the results, and the same command goes on from there.
    """
    wanted = [(method, ratio) for ratio in ratios for method in METHODS if (method, ratio) not in known_peers(results)]
    if not wanted:
        return
    if not python.is_file():
        raise PeersFailed(f"there is no {python}: make peers")
    order = {
        "model": model,
        "dtype": "float32",
        "texts": [text.ids for text in tasks.texts],
        "context": tasks.context,
        "wanted": wanted,
        "interviews": [
            {"context": i.context, "questions": [question.suffix for question in i.questions]} for i in tasks.interviews
        ],
        "interview_shares": {str(ratio): [tasks.share(i, ratio) for i in tasks.interviews] for _, ratio in wanted},
        "new_tokens": ANSWER_TOKENS,
    }
    bar = progress.add_task("peers, minutes each", total=len(wanted))
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as given:
        json.dump(order, given)
        given.seek(0)
        command = [str(python.absolute()), str(SCRIPT)]
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                method, share = found["method"], found["share"]
                entry = {"peer": method, "share": share, **_result(found, tasks, tokenizer)}
                results.add(f"kvpress {method}, {share:g}", entry)
                progress.advance(bar)
        finally:
            # Ctrl-C and a kill end it, too.
            process.terminate()
            status = process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    progress.remove_task(bar)
    if set(wanted) - set(known_peers(results)):
        raise PeersFailed(f"the peers failed ({status}): {(said or ['no reason given'])[-1]}")


def _result(found: dict[str, Any], tasks: Tasks, tokenizer: Any) -> dict[str, Any]:
    """What is kept of one method at one share."""
    right: dict[str, list[list[bool]]] = {kind: [] for kind in KINDS}
    for interview, said in zip(tasks.interviews, found["answers"], strict=True):
        answers = [tokenizer.decode(ids) for ids in said]
        right[interview.kind].append(
            [is_right(question.answer, a) for question, a in zip(interview.questions, answers, strict=True)]
        )
    nll = [round(float(np.mean(values)), 6) for values in found["nll"]]
    return {"texts": {"continuation_nll": nll}, "right": right}
