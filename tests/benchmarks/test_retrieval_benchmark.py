"""Parts of the retrieval axis of quality that need no server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.errors import PointFailed
from benchmarks.harness.forced import Forced
from benchmarks.quality.__main__ import parser
from benchmarks.quality.retrieval.axis import groups_of
from benchmarks.quality.retrieval.measured import Measured, counts, decoded_states
from benchmarks.quality.retrieval.results import Results, draw, key, tables
from benchmarks.quality.texts import Text

TEXT = Text("prose", tuple(range(10, 18)))


class Answering:
    """A server whose hidden states are the token's place; it decodes what it is told unless it is deaf."""

    def __init__(self, deaf: bool = False) -> None:
        self.deaf = deaf

    def generate(self, ids, new_tokens, *, ignore_eos, forced, return_hidden_states):
        assert new_tokens == len(forced)
        places = [[float(place)] for place in range(len(ids) + new_tokens - 1)]
        states = [places[: len(ids)], *places[len(ids) :]]
        return {"output_ids": [0] * len(forced) if self.deaf else list(forced), "meta_info": {"hidden_states": states}}


def test_states_of_what_is_decoded_begin_with_the_last_of_the_prompt():
    assert decoded_states(Answering(), TEXT, 5).tolist() == [[4.0], [5.0], [6.0]]
    with pytest.raises(PointFailed, match="did not decode what the text says"):
        decoded_states(Answering(deaf=True), TEXT, 5)


def test_every_request_gets_its_next_token():
    so_far = [SimpleNamespace(output_ids=[]), SimpleNamespace(output_ids=[7, 8])]
    params = [{"tokens": tokens, "__req__": req} for tokens, req in zip(([3, 1], [7, 8, 2]), so_far, strict=True)]
    found = Forced.from_str(Forced.to_str())(torch.randn(2, 5), params)
    assert found.argmax(-1).tolist() == [3, 2]
    assert torch.isinf(found).sum() == 8


def test_counters_are_those_of_retrieval():
    text = 'sglang:ragged_pivot_questions_total{rank="0"} 6.0\nsglang:ragged_kept_ratio{rank="0"} 0.3\n'
    assert counts(text) == {"pivot_questions": 6, "pivot_answers": 0, "retrieved_rows": 0}


def test_servers_are_the_token_pool_and_each_ratio_with_and_without():
    options = parser("retrieval").parse_args(
        ["--model", "m", "--profile", "p", "--ratio", "0.1", "0.2", "--ragged-args", "--ragged-pivots 3"]
    )
    groups = groups_of(options)
    assert [list(group) for group in groups] == [["token"], ["0.1", "0.1 + 128"], ["0.2", "0.2 + 128"]]
    assert groups[2]["0.2"].flags == []
    assert groups[2]["0.2 + 128"].flags == [
        "--ragged-reservoir",
        "1GiB",
        "--ragged-overlay",
        "128",
        "--ragged-pivots",
        "3",
    ]


def test_table_and_plot(tmp_path):
    results = Results(tmp_path / "retrieval.json", {"prompt": 1280, "row_bytes": 512}, {})
    same = {"delta_nll": [0.1, 0.1], "agrees": [0.9, 0.9], "tokens": 100, "start_up": ""}
    for name, kl, step, asked in (
        ("token", 0.0, 40.0, (0, 0, 0)),
        (key(0.15, 0), 0.1, 20.0, (0, 0, 0)),
        (key(0.15, 64), 0.04, 30.0, (10, 4, 50)),
    ):
        questions, answers, rows = asked
        results.pools[name] = Measured(
            kl=[kl, kl], step_ms=[step, 2 * step, step], questions=questions, answers=answers, rows=rows, **same
        )
    (made,) = tables(results)
    assert made.rows[0][:2] == ("token", "0.0000 ± 0.0000")
    assert made.rows[1][1:] == ("0.1000 ± 0.0000", "", "0.1000", "0.900", "0.150", "", "", "20.0", "")
    assert made.rows[2][1:] == ("0.0400 ± 0.0000", "0.40", "0.1000", "0.900", "0.200", "0.40", "256", "30.0", "1.50")
    results.write()
    again = Results.open(results.path, results.settings, {})
    assert again.pools == results.pools
    draw(again, tmp_path / "retrieval.png")
    assert (tmp_path / "retrieval.png").stat().st_size > 5000
