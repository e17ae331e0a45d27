"""Gives the peers (`peers.py`, in their own environment) the same texts and questions as the servers."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.results import Results
from benchmarks.quality.facts import KINDS, is_right
from benchmarks.quality.measured import figures
from benchmarks.quality.quantisers import SCHEMES, byte_share
from benchmarks.quality.served import ANSWER_TOKENS, Answers
from benchmarks.quality.table import peers as known_peers
from benchmarks.quality.tasks import Tasks

SCRIPT = Path(__file__).with_name("peers.py")

METHODS = (
    *("KeyDiff", "SnapKV", "ExpectedAttention", "AdaKV + SnapKV", "AdaKV + ExpectedAttention"),
    *("KVzip", "KVzip+", "AdaKV + Compactor", "Merging + SnapKV"),
)
"""Methods of kvpress in `peers.py`; none of them sees the question when it compresses."""


class PeersFailed(BenchmarkError):
    """The peers' environment is missing or its program failed."""


@dataclass(frozen=True)
class Exact:
    """SGLang's token pool on the same texts.

    Attributes:
        states: hidden states of every text, [tokens, hidden size].
        head: [vocabulary, hidden size].
    """

    states: list[torch.Tensor]
    head: torch.Tensor


def missing_peers(
    results: Results, methods: Sequence[str], ratios: Sequence[float], head_dim: int
) -> list[tuple[str, float]]:
    """List methods and shares that the results lack. A scheme that keeps every token has one share, of bytes."""
    removing = [(method, ratio) for ratio in ratios for method in methods if method in METHODS]
    quantising = [(method, byte_share(method, head_dim)) for method in methods if method in SCHEMES]
    known = known_peers(results)
    return [one for one in (*removing, *quantising) if one not in known]


def ask_peers(
    python: Path,
    model: str,
    tasks: Tasks,
    tokenizer: Any,
    wanted: Sequence[tuple[str, float]],
    exact: Exact | None,
    results: Results,
    progress: Progress,
) -> None:
    """Measure peers, and add each result as soon as it is there.

    Args:
        wanted: by `missing_peers`.
        exact: needed if one of them keeps every token.

    Raises:
        PeersFailed: what was measured before is in the results, and the same command goes on from there.
    """
    if not wanted:
        return
    if not python.is_file():
        raise PeersFailed(f"there is no {python}: make peers")
    order = {
        "model": model,
        "dtype": "float32",
        "texts": [text.ids for text in tasks.texts],
        "context": tasks.context,
        "segment": tasks.segment,
        "wanted": wanted,
        "interviews": [
            {"context": i.context, "questions": [question.suffix for question in i.questions]} for i in tasks.interviews
        ],
        "interview_shares": {str(share): [tasks.share(i, share) for i in tasks.interviews] for _, share in wanted},
        "new_tokens": ANSWER_TOKENS,
    }
    bar = progress.add_task("peers, minutes each", total=len(wanted))
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        (Path(folder) / "order").write_text(json.dumps(order | {"folder": folder}))
        command = [str(python.absolute()), str(SCRIPT)]
        with (Path(folder) / "order").open() as given:
            process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                method, share = found["method"], found["share"]
                entry = {"peer": method, "share": share, **_result(found, tasks, tokenizer, exact)}
                results.add(f"kvpress {method}, {share:g}" if method in METHODS else method, entry)
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


def _result(found: dict[str, Any], tasks: Tasks, tokenizer: Any, exact: Exact | None) -> dict[str, Any]:
    """Return what is stored of one method at one share: of schemes that keep every token all that servers have."""
    right = []
    for interview, said in zip(tasks.interviews, found["answers"], strict=True):
        answers = [tokenizer.decode(ids) for ids in said]
        right.append([is_right(question.answer, a) for question, a in zip(interview.questions, answers, strict=True)])
    nll = {"continuation_nll": [round(float(np.mean(values)), 6) for values in found["nll"]]}
    if "states" not in found:
        kinds = [interview.kind for interview in tasks.interviews]
        by_kind = {kind: [one for own, one in zip(kinds, right, strict=True) if own == kind] for kind in KINDS}
        return {"texts": nll, "right": by_kind}
    assert exact is not None
    all_of = figures(Answers(torch.load(found["states"]), right, ""), exact.states, exact.head, tasks)
    return all_of | {"texts": all_of["texts"] | nll}
