"""Asks the peers (`peers.py`, in their own environment) the same as the servers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.quality.facts import KINDS, is_right
from benchmarks.quality.measured import Tasks
from benchmarks.quality.served import ANSWER_TOKENS
from benchmarks.quality.store import Results

SCRIPT = Path(__file__).with_name("peers.py")


class PeersFailed(RuntimeError):
    """The peers' environment is missing or its program failed; the message is one line."""


def ask_peers(
    python: Path,
    model: str,
    tasks: Tasks,
    tokenizer: Any,
    ratios: Sequence[float],
    results: Results,
    console: Console,
) -> None:
    """Add what the peers make of the tasks at the shares that the ratios leave. Raises PeersFailed."""
    missing = [ratio for ratio in ratios if not any(share == ratio for _, share in results.peers)]
    if not missing:
        return
    if not python.is_file():
        raise PeersFailed(f"there is no {python}: make peers")
    order = {
        "model": model,
        "dtype": "float32",
        "texts": [text.ids for text in tasks.texts],
        "context": tasks.context,
        "shares": missing,
        "interviews": [
            {"context": i.context, "questions": [question.suffix for question in i.questions]} for i in tasks.interviews
        ],
        "interview_shares": {str(ratio): [tasks.share(i, ratio) for i in tasks.interviews] for ratio in missing},
        "new_tokens": ANSWER_TOKENS,
    }
    with console.status("peers, ten minutes and more"):
        done = subprocess.run(
            [str(python.absolute()), str(SCRIPT)], input=json.dumps(order), capture_output=True, text=True
        )
    if done.returncode:
        raise PeersFailed(f"the peers failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    for found in json.loads(done.stdout):
        right: dict[str, list[list[bool]]] = {kind: [] for kind in KINDS}
        for interview, said in zip(tasks.interviews, found["answers"], strict=True):
            answers = [tokenizer.decode(ids) for ids in said]
            right[interview.kind].append(
                [is_right(question.answer, a) for question, a in zip(interview.questions, answers, strict=True)]
            )
        nll = [round(float(np.mean(values)), 6) for values in found["nll"]]
        results.add_peer(found["method"], found["share"], {"texts": {"continuation_nll": nll}, "right": right})
