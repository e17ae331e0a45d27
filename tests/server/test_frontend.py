"""The frontend programs of `examples/` on a ragged server: as on the token pool at ratio 1, and each as a script."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import jsonschema
import pytest

from examples import constrained
from tests.server.frontend_programs import PROGRAMS, run_programs

pytestmark = pytest.mark.server

FLAGS = ("--dtype", "float32", "--kv-bytes", "16MiB", "--max-running-requests", "4")
FLAGS += ("--constrained-json-disable-any-whitespace",)
"""A random model would fill its answer with spaces that JSON allows."""
SCRIPTS = sorted(
    path for path in (Path(__file__).parents[2] / "examples").glob("[!_]*.py") if path.stem != "connecting"
)


@pytest.fixture(scope="module")
def server(character_model, servers, tmp_path_factory):
    flags = [*FLAGS, "--kv-pool", "ragged", "--ragged-ratio", "1", "--ragged-segment", "64"]
    with servers.serve(character_model, *flags, log=tmp_path_factory.mktemp("log") / "ragged.log") as server:
        yield server


@pytest.fixture(scope="module")
def outcomes(server):
    return {outcome.program: outcome for outcome in run_programs(server.url)}


def test_outputs_equal_the_token_pool(character_model, servers, outcomes, tmp_path):
    with servers.serve(character_model, *FLAGS, "--kv-pool", "token", log=tmp_path / "token.log") as server:
        expected = run_programs(server.url)
    assert list(outcomes) == [want.program for want in expected] == list(PROGRAMS)
    for want in expected:
        found = outcomes[want.program]
        assert (found.text, found.variables) == (want.text, want.variables)
        assert found.prompt == want.prompt
        # The token pool shares every token, the ragged pool at most as many. What forks share hangs on which of them
        # is computed by the time the next one arrives.
        assert want.program == "fork and join" or found.cached <= want.cached


def test_turns_and_forks_find_their_prefix(outcomes):
    """By prompt lengths: each later turn finds the segments of the turn before, each fork those of the text."""
    for program in ("multi-turn chat", "fork and join"):
        outcome = outcomes[program]
        assert outcome.cached > outcome.prompt / 2, program


def test_constrained_answers_have_their_form(outcomes):
    variables = outcomes["regex and JSON"].variables
    assert re.fullmatch(constrained.DATE, variables["date"])
    jsonschema.validate(json.loads(variables["person"]), constrained.PERSON)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_examples_are_scripts(script, server, outcomes, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--url", server.url])
    # As Python does for a script.
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    answers = {
        "chat": outcomes["multi-turn chat"].variables["answer 4"],
        "constrained": outcomes["regex and JSON"].variables["date"],
        "fork_join": outcomes["fork and join"].variables["summary"],
        "streaming": outcomes["streaming"].variables["answer"],
    }
    assert answers[script.stem].strip() in printed
