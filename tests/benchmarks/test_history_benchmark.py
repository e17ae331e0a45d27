"""Parts of the history axis of quality that need no server, and the samples that models are calibrated with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.errors import PointFailed
from benchmarks.quality import facts, texts
from benchmarks.quality.__main__ import parser
from benchmarks.quality.history.axis import pools_of
from benchmarks.quality.history.results import PARTS, Measured, Results, behind, draw, tables, text_nll
from benchmarks.quality.own_samples import asked_interviews, other_pieces
from benchmarks.quality.texts import Text
from tests.benchmarks.test_quality import Words


class Answering:
    """A server that gives token n of a prompt the log-probability -n; the first has none."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def generate(self, ids, new_tokens, *, return_logprobs):
        found = [[None, 0, None], *([-float(n), 0, None] for n in range(1, self.tokens))]
        return {"meta_info": {"input_token_logprobs": found}}


def test_a_text_is_read_in_parts():
    assert text_nll(Answering(17), Text("prose", tuple(range(17)))) == [1.5 + 2 * part for part in range(PARTS)]
    with pytest.raises(PointFailed, match="of 15 of 16 tokens"):
        text_nll(Answering(16), Text("prose", tuple(range(17))))


def test_pools_are_one_for_each_bound_and_score():
    options = parser("history").parse_args(["--model", "m", "--scores", "recency", "value_novelty"])
    names = [pool.name for pool in pools_of(options)]
    assert names[:3] == ["token", "ragged@1", "ragged@1+history=1536+history-score=recency"]
    assert len(names) == 6


def test_what_is_lost_is_told_by_place(tmp_path):
    settings = {"text_tokens": 800}
    results = Results(tmp_path / "history.json", settings, {})
    nll = [[1.0] * PARTS, [2.0] * PARTS]
    results.pools["token"] = Measured(nll, [[True, True], [True, True]], "")
    worse = [[1.0] * 4 + [1.5] * 4, [2.0] * 4 + [2.7] * 4]
    results.pools["ragged@1+history=400"] = Measured(worse, [[False, True], [False, True]], "line")
    assert behind(800, 400) == slice(4, None)
    row = tables(results)[0].rows[1]
    assert row[1:10] == (*["0.000"] * 4, *["0.600"] * 4, "0.6000 ± 0.1000")
    assert row[10:] == ("2 of 4", "0.00", "1.00")
    results.write()
    again = Results.open(results.path, settings, {})
    np.testing.assert_array_equal(again.lost("ragged@1+history=400"), results.lost("ragged@1+history=400"))
    draw(again, tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 5000


def test_own_samples_are_not_what_is_evaluated():
    tokenizer = Words()
    evaluated = {tuple(text.ids) for text in texts.pieces(tokenizer, 100)}
    found = other_pieces(tokenizer, 100, 8)
    assert all(len(ids) == 100 and tuple(ids) not in evaluated for ids in found)
    asked = asked_interviews(tokenizer, 4, facts=2, length=60)
    own = [one for kind in facts.KINDS for one in facts.interviews(tokenizer, kind, 4, facts=2, length=60)]
    assert not {tuple(ids) for ids in asked} & {one.context for one in own}
    # The last answer ends the sample.
    assert tokenizer.decode(asked[0])[-2:] == ".\n"
