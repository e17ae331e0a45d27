"""A crowd with prompts in chunks on a pool that is too small for it: no answer lacks a token, not even its first.

Every answer is compared with what the same server says to its tokens afterwards, alone and with an empty cache, from
the first token on. An answer that had lost one would be another answer's from there on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.harness.errors import ServerFailed
from benchmarks.recall import MODEL
from benchmarks.storm.features import STRICT
from benchmarks.storm.quiet import TOLERANCE, QuietServer
from benchmarks.storm.traffic import VOCABULARY, Survivor
from sgl_ragged.mem_pool.open_pages import OpenPages
from tests.examples import USUAL, fewer
from tests.server.client import flush, generate, server_settings

pytestmark = pytest.mark.server

CLIENTS, REQUESTS, ROUNDS = 12, 24, 10
"""In each round every client asks twice."""

FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "12"),
    *("--max-total-tokens", "3072", "--chunked-prefill-size", "256", "--schedule-conservativeness", "0.1"),
)
RAGGED = ("--kv-pool", "ragged", "--ragged-ratio", "0.5", "--ragged-segment", "256")
"""With pages this large, the next chunk of a prompt often finds no room where a short prompt would find some."""

CHAINS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", "5"),
)


def requests(seed: int) -> list[tuple[list[int], int]]:
    """Prompts and numbers of tokens to answer: a third of the prompts are cut into chunks, three to six each."""
    rng = np.random.default_rng(seed)
    asked = []
    for number in range(REQUESTS):
        prompts, answers = ((600, 1300), (8, 40)) if number % 3 == 0 else ((20, 100), (20, 90))
        prompt = rng.choice(np.array(VOCABULARY), int(rng.integers(*prompts))).tolist()
        asked.append((prompt, int(rng.integers(*answers))))
    return [asked[place] for place in rng.permutation(REQUESTS)]


def crowd(server, asked: list[tuple[list[int], int]]) -> list[Survivor]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda one: generate(server, *one), asked))
    return [
        Survivor(tuple(prompt), tuple(answer.tokens), tuple(answer.output_logprobs), None, True, answer.cached, 0)
        for (prompt, _), answer in zip(asked, answers, strict=True)
    ]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(RAGGED, id="ragged"),
        pytest.param((), id="sglang", marks=pytest.mark.thorough),
        pytest.param((*RAGGED, "--disable-overlap-schedule"), id="no-overlap", marks=pytest.mark.thorough),
        pytest.param((*RAGGED, *CHAINS), id="drafts", marks=pytest.mark.thorough),
    ],
)
def test_no_answer_lacks_a_token(servers, tmp_path, flags):
    with servers.serve(MODEL, *FLAGS, *flags, log=tmp_path / "log", env=STRICT) as server:
        quiet, wrong, compared = QuietServer(server.url), [], 0
        for seed in range(ROUNDS if fewer(USUAL) == USUAL else 1):
            flush(server)
            asked = requests(seed)
            for answer, (_, new) in zip(crowd(server, asked), asked, strict=True):
                assert len(answer.tokens) == new
                difference = quiet.difference(answer)
                if not difference <= TOLERANCE and quiet.nearest(answer) > TOLERANCE:
                    wrong.append((seed, len(answer.prompt), new, difference, quiet.begins(answer)))
                compared += 1
        print(compared, "compared")
        assert wrong == []


def test_the_smallest_pool_answers(servers, tmp_path):
    """A prompt of a page and an answer of nearly one. With a page less no prompt would be answered: it is refused."""
    least = (1 + 1 + 2 * 4) * 64
    flags = ("--kv-pool", "ragged", "--ragged-ratio", "0.3", "--ragged-segment", "64")
    common = ("--dtype", "float32", "--skip-tokenizer-init", *flags)
    with servers.serve(MODEL, *common, "--max-total-tokens", str(least), log=tmp_path / "log", env=STRICT) as server:
        pages = OpenPages(64, server_settings(server)["open_page_tokens"])
        assert pages.most == 4
        for seed in range(2):
            prompt = np.random.default_rng(seed).choice(np.array(VOCABULARY), 64).tolist()
            assert len(generate(server, prompt, 63).tokens) == 63
    with (
        pytest.raises(ServerFailed, match="is too few for one request"),
        servers.serve(MODEL, *common, "--max-total-tokens", str(least - 1), log=tmp_path / "refused"),
    ):
        pass
