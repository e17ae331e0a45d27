"""Parts of benchmarks.storm that need no server."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.errors import SettingsError
from benchmarks.harness.launch import Server
from benchmarks.harness.results import Results
from benchmarks.storm.__main__ import names_of
from benchmarks.storm.features import FEATURES, HIDING, STRICT, chosen, server_settings
from benchmarks.storm.material import Material
from benchmarks.storm.one_storm import Outcome, _compare, _signs, before_ties
from benchmarks.storm.pairs import cover, narrow, pairs_of, shown
from benchmarks.storm.quiet import TOLERANCE, QuietServer
from benchmarks.storm.tables import REFUSED, refused, storms, survived, tables
from benchmarks.storm.traffic import Survivor
from sgl_ragged.profiles.profile import load_profile

NAMES = tuple("abcdefgh")


@given(
    refused=st.sets(st.sampled_from(sorted(pairs_of(NAMES)))),
    hides=st.sets(st.sampled_from(NAMES), max_size=3),
    most=st.integers(2, 8),
)
def test_every_pair_that_is_not_refused_is_shown(refused, hides, most):
    rows = cover(NAMES, refused, tuple, hides, most)
    assert all(not pairs_of(row) & refused and len(row) <= most for row in rows)
    assert set().union(*(shown(row, hides) for row in rows)) == pairs_of(NAMES) - refused


def test_what_hides_is_alone_with_each():
    assert shown(("a", "b", "c"), {"b"}) == {("a", "b"), ("b", "c")}
    assert shown(("a", "b", "c"), {"a", "b"}) == pairs_of("abc")
    assert shown(("a", "c"), {"b"}) == {("a", "c")}


def test_pairs_that_came_before_are_left_out():
    assert cover("abc", (), tuple, (), 3, covered=pairs_of("abc")) == []
    assert cover("abc", (), tuple, (), 3, covered=[("a", "b"), ("a", "c")]) == [("b", "c")]


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=3))
def test_narrow_finds_what_a_failure_needs(culprits):
    assert set(narrow(NAMES, lambda names: culprits <= set(names))) == culprits


def test_features_bring_what_they_need():
    assert names_of(["codec-fp8"]) == ("keydiff", "tier", "codec-fp8", "fcfs")
    assert names_of(["lpm", "gate", "disk", "recompute"]) == ("gate", "disk", "recompute", "lpm")
    assert names_of(["tier", "disk"]) == ()
    with pytest.raises(SettingsError, match="lpm and priority are settings of the same flag"):
        chosen(["priority", "lpm"])
    with pytest.raises(SettingsError, match="unknown features rain; known: keydiff"):
        chosen(["rain"])


def test_every_feature_makes_a_command_line(tmp_path):
    """A quiet server has the flags of its storm, but for the sizes of its pools."""
    material = Material(tmp_path)
    for name in FEATURES:
        storm, quiet = (
            server_settings(chosen([name]), material, tmp_path / "pages", quiet=quiet) for quiet in (False, True)
        )
        assert not any("{" in flag for flag in storm.flags)
        pools = {"--max-total-tokens", "--swa-full-tokens-ratio"}
        before = ("", *storm.flags)
        assert {before[place] for place, (a, b) in enumerate(zip(storm.flags, quiet.flags, strict=True)) if a != b} <= (
            pools
        )
        assert set(storm.env) - set(quiet.env) == {"SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL"}
        assert set(STRICT) <= set(quiet.env)
        profile = storm.flags[storm.flags.index("--ragged-profile") + 1]
        if profile != "uniform":
            assert load_profile(profile).mu.max() > 4 * load_profile(profile).mu.min()


def test_answers_are_cut_off_after_segments_that_repeat_themselves():
    varied, same = list(range(64)), [5, 6, 7, 8] * 16

    def left(prompt, answer):
        logprobs = tuple(-float(place) for place in range(len(answer)))
        cut = before_ties(Survivor(tuple(prompt), tuple(answer), logprobs, None, False, 0, 0), 64)
        assert cut is None or cut.logprobs == logprobs[: len(cut.tokens)]
        return 0 if cut is None else len(cut.tokens)

    assert left(varied, [5] * 40) == 40, "the segment is not finished"
    assert left(varied, [*same, *varied]) == 65
    assert left(varied[:60], [1] * 4 + same + varied) == 4 + 64 + 1
    assert left(varied * 2, varied) == 64
    assert left(same, varied) == 1
    assert left([*same, 1], varied) == 0
    silent = Survivor(tuple(same), tuple(varied), None, None, False, 0, 0)
    assert before_ties(silent, 64) == dataclasses.replace(silent, tokens=silent.tokens[:1])


class Quiet(QuietServer):
    """Gives one of several answers to whoever asks, in turns."""

    def __init__(self, *given: list[float]) -> None:
        self.given = itertools.cycle(given)

    def _forced(self, survivor, *, flush, behind):
        """The likeliest tokens have -0.5."""
        own = np.array(next(self.given))
        return own, np.full(len(own), -0.5)

    def _flush(self):
        pass

    def _ask(self, tokens, adapter, new, **more):
        return {"output_token_logprobs": [(logprob, 1) for logprob in next(self.given)]}


def survivor(*logprobs: float, greedy: bool = False) -> Survivor:
    return Survivor((5, 6), (1,) * len(logprobs), logprobs, None, greedy, 0, 0)


def test_answers_that_differ_are_a_problem():
    outcome = Outcome(("keydiff",))
    _compare(Quiet([-1.0, -2.0]), [survivor(-1.0, -2.0), survivor(-1.0, -2.1)], outcome, False, lambda: None)
    assert (outcome.compared, outcome.above, outcome.ties) == (2, 1, 0)
    assert outcome.largest == pytest.approx(0.1)
    assert "1 of 2 answers differ from a quiet server's by up to 1.0e-01" in outcome.problems[0]
    outcome = Outcome(("fp8",), inexact=("documented",))
    _compare(Quiet([-1.0]), [survivor(-1.1)], outcome, False, lambda: None)
    assert (outcome.above, outcome.problems) == (1, [])


def test_greedy_answers_without_logprobs_took_the_likeliest_tokens():
    silent = Survivor((5, 6), (1, 1), None, None, True, 0, 0)
    for own, above in (([-0.5, -0.50005], 0), ([-0.5, -0.6], 1)):
        outcome = Outcome(("mixed-chunk",))
        _compare(Quiet(own, own), [silent], outcome, False, lambda: None)
        # Its own decode takes the same tokens, whatever they are.
        assert (outcome.above + outcome.ties, outcome.compared) == (above, 1)
    assert Quiet([0.0, 0.0]).decoded_difference(silent) == 0
    assert Quiet([0.0]).decoded_difference(silent) == np.inf


def test_nan_is_no_answer():
    outcome = Outcome(("keydiff",))
    _compare(Quiet([-1.0]), [survivor(float("nan"))], outcome, False, lambda: None)
    assert outcome.problems


def test_what_the_quiet_server_says_in_another_batch_is_a_tie():
    outcome = Outcome(("keydiff",))
    _compare(Quiet([-1.0], [-1.0], [-1.5]), [survivor(-1.5)], outcome, False, lambda: None)
    assert (outcome.ties, outcome.above, outcome.problems) == (1, 0, [])
    assert outcome.largest_tie == pytest.approx(0.5)
    assert outcome.largest < TOLERANCE


def test_decoding_is_compared_as_far_as_it_is_the_same():
    """Two tokens may be equally likely; what stands behind the other one is another text."""

    class Decoding(Quiet):
        def _ask(self, *_, **__):
            return {"output_token_logprobs": [(-1.0, 1), (-2.0, 9), (-3.0, 1)]}

    assert Decoding([0.0]).decoded_difference(survivor(-1.0, -2.0, -9.0)) == 0
    assert Decoding([0.0]).decoded_difference(survivor(-1.0, -2.5, -9.0)) == pytest.approx(0.5)


def test_results_come_back_from_their_file(tmp_path):
    results = Results(tmp_path / "storm.json", "storm", {"seed": 0})
    good = Outcome(("gate", "tier"), ends={"answered": 9, "left": 1}, compared=9, largest=2e-5)
    bad = Outcome(("keydiff", "tier"), problems=["hang"])
    results.add("gate + tier", good)
    results.add("keydiff + tier", bad)
    results.add(REFUSED, [("history", "reservoir", "sgl_ragged: no"), ("a", "a", "sgl_ragged: never")])
    again = Results.open(tmp_path / "storm.json", "storm", {"seed": 0})
    assert storms(again) == {"gate + tier": good, "keydiff + tier": bad}
    assert refused(again) == {("history", "reservoir"): "sgl_ragged: no", ("a", "a"): "sgl_ragged: never"}
    assert survived(again) == {("gate", "tier")}
    outcomes, reasons = tables(again)
    assert [row[-1] for row in outcomes.rows] == ["yes", "no"]
    assert [row[0] for row in reasons.rows] == ["history with reservoir", "a"]


def test_hiding_features_are_those_that_change_answers_or_share_nothing():
    inexact = {"fp8-e4m3", "fp8-e5m2", "int8", "k8v4", "k6v4", "k4v4", "codec-fp8", "codec-shared", "reservoir"}
    assert inexact | {"no-radix"} == HIDING


def test_signs_of_a_leak_are_found_and_harmless_lines_are_not(tmp_path):
    log = tmp_path / "log"
    harmless = (
        "[2026-11-23] post-warmup freeze_gc failed\nTraceback (most recent call last):\n  refused\n[2026-11-23] up\n"
        "/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked objects\n"
    )
    log.write_text(harmless)
    assert _signs(Server("", None, log)) == []
    log.write_text(harmless + "[2026-11-23] token_to_kv_pool_allocator memory leak detected!\n")
    assert "memory leak detected" in _signs(Server("", None, log))[0]
