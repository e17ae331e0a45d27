"""The command line of accuracy suites: what does not go together is one line, before any server starts."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy import recall
from benchmarks.accuracy.cell import TOKEN, Cell, Key
from benchmarks.accuracy.options import RESULTS, SCORERS, complete, form_of, keys_of, parser
from benchmarks.accuracy.prompts import PromptFormat
from benchmarks.accuracy.store import Results
from benchmarks.demo import MODEL
from benchmarks.harness.errors import SettingsError

PROFILE = MODEL.parent / "keydiff-coverage.safetensors"
RULER = ["--suite", "ruler", "--data", "/tmp", "--model", str(MODEL)]
SCBENCH = ["--suite", "scbench", "--data", "/tmp", "--model", str(MODEL)]
OTHER_MODEL = ["--suite", "scbench", "--data", "/tmp", "--model", "/tmp"]


def options(*arguments: str):
    parsed = parser("").parse_args(arguments)
    complete(parsed)
    return parsed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "x"], "--data: for --suite ruler and scbench"),
        (["--tasks", "kv", "--limit", "3"], "--tasks, --limit: for --suite ruler"),
        (["--chat"], "--chat: the recall suite"),
        (["--suite", "ruler"], "--suite ruler needs --data, --model"),
        (["--suite", "scbench", "--data", "x"], "--suite scbench needs --model"),
        ([*SCBENCH, "--data", "/none/at/all"], "--data /none/at/all does not exist"),
        ([*SCBENCH, "--seed", "1", "--questions", "2"], "--questions, --seed: for --suite recall"),
        ([*OTHER_MODEL, "--calibrate-at", "0.3"], "--calibrate-at: for the recall model only"),
        ([*RULER, "--mode", "turns"], "ruler asks one question"),
        (["--answers", "own"], "--answers own belongs to --mode turns"),
        ([*SCBENCH, "--mode", "requests", "--answers", "own"], "--answers own belongs to --mode turns"),
        ([*SCBENCH, "--limit", "0"], "--limit must be at least 1"),
        (["--max-length", "0"], "--max-length must be at least 1"),
        (["--max-running-requests", "0"], "--max-running-requests must be at least 1"),
        (["--kv-bytes", "much"], "--kv-bytes"),
        (["--segment", "100"], "multiple of 16"),
        (["--ratio", "1.5"], r"ratio 1\.5 is outside \(0, 1\]"),
        (["--ratio", "0.5", "0"], r"ratio 0\.0 is outside"),
        (["--ratio", "nan"], "ratio nan is outside"),
        (["--ratio", "0.5", "0.5"], "--ratio: each value once"),
        (["--calibrate-at", "0"], "is outside"),
        (["--scorer", "keydif"], "unknown scorer 'keydif'"),
        (["--pool", "token", "token"], "--pool: each"),
        (["--pool", "token", "--scorer", "keydiff", "--ratio", "0.5"], "--scorer, --ratio: for the ragged pool"),
        (["--pool", "token", "--ragged-args=--ragged-kernel=torch"], "--ragged-args: for the ragged pool"),
        (["--budgets", "covrage"], "--budgets covrage: covrage is no file, and no kind"),
        (["--budgets", "/none/{scorer}.safetensors", "--scorer", "h2o"], r"/none/h2o\.safetensors is no file"),
        (["--budgets", str(PROFILE), f"./{PROFILE.name}"], "is no file"),
        (["--budgets", str(PROFILE), f"{PROFILE.parent}/../recall/{PROFILE.name}"], "different file names"),
        ([*OTHER_MODEL, "--budgets", "coverage"], "recall model only: run `python -m calib run --model /tmp"),
        (["--ragged-args", "--ragged-ratio 0.2"], "--ragged-args: --ragged-ratio is set by --ratio"),
        (["--server-args=--kv-bytes=1GiB"], "--server-args: --kv-bytes is set by --kv-bytes"),
        (["--server-args", "--tp 2 '"], "--server-args: No closing quotation"),
        (["--output", "results.txt"], r"must end in \.json"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(arguments, message):
    with pytest.raises(SettingsError, match=message) as caught:
        options(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [["--ratios", "0.5"], ["--scor", "keydiff"], ["--suite", "other"]])
def test_options_are_not_guessed(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        options(*arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("python -m benchmarks.accuracy: error:")


def test_defaults_of_suites():
    plain = options()
    assert (plain.model, plain.seed, plain.scorer) == (str(MODEL), 2**34, list(SCORERS))
    assert form_of(plain) == PromptFormat("requests")
    assert plain.output == RESULTS / "accuracy-cpu.json"
    assert len(keys_of(plain)) == 1 + 8 * 3 * 4
    assert next(iter(keys_of(plain))) == TOKEN
    bench = options(*SCBENCH)
    assert form_of(bench) == PromptFormat("turns")
    assert bench.output.name == "accuracy-scbench-checkpoint.json"
    assert list(keys_of(bench)) == [TOKEN, *(Key("ragged", "keydiff", "auto", ratio) for ratio in (0.5, 0.3))]
    assert form_of(options(*RULER, "--chat")) == PromptFormat("requests", chat=True)
    assert form_of(options(*SCBENCH, "--answers", "own")) == PromptFormat("turns", own=True)


def test_a_profile_is_called_by_its_file():
    keys = keys_of(options("--scorer", "keydiff", "--budgets", str(PROFILE), "uniform", "--ratio", "0.5"))
    assert keys == {
        TOKEN: "",
        Key("ragged", "keydiff", "keydiff-coverage", 0.5): str(PROFILE),
        Key("ragged", "keydiff", "uniform", 0.5): "uniform",
    }


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """The one line that main() ends with; it starts no server."""

    def started(*_: object) -> None:
        raise AssertionError("a server was about to be started")

    monkeypatch.setattr(accuracy, "Started", started)
    monkeypatch.setattr(sys, "argv", ["accuracy", *arguments])
    with pytest.raises(SystemExit) as caught:
        accuracy.main()
    line = caught.value.code
    assert line.startswith("accuracy: ")
    assert "\n" not in line
    assert not capsys.readouterr().err
    return line


def test_budgets_that_cannot_be_served_are_refused_before_a_server_starts(monkeypatch, capsys, tmp_path):
    common = ["--output", str(tmp_path / "a.json"), "--ratio", "0.5", "--conversations", "1"]

    def line(*arguments: str) -> str:
        return refused(monkeypatch, capsys, *common, *arguments)

    assert "calibrated with scorer 'keydiff', --ragged-scorer is 'h2o'" in line(
        "--scorer", "h2o", "--budgets", str(PROFILE)
    )
    assert "needs trained gates" in line("--scorer", "fastkvzip", "--budgets", "uniform")
    (tmp_path / "damaged.safetensors").write_text("x")
    assert "damaged" in line("--scorer", "keydiff", "--budgets", str(tmp_path / "damaged.safetensors"))
    assert "has no weights" in line(
        "--scorer", "keydiff", "--budgets", "uniform", "--ragged-args", f"--ragged-scorer-weights {PROFILE}"
    )
    assert not (tmp_path / "a.json").exists()


def test_prompts_that_are_too_long_are_refused_before_a_server_starts(monkeypatch, capsys, tmp_path):
    arguments = ["--output", str(tmp_path / "a.json"), "--pool", "token", "--max-length", "2000"]
    line = refused(monkeypatch, capsys, *arguments)
    assert "session conversation 1 has a prompt of 2053 tokens, and the limit is 2000" in line


def test_a_finished_file_of_other_settings_is_refused(monkeypatch, capsys, tmp_path):
    path = tmp_path / "a.json"
    parsed = options("--conversations", "1", "--output", str(path))
    sessions = recall.load(1, 10, 2**34)
    results = Results.open(path, accuracy.settings_of(parsed, sessions), {})
    results.add([Cell("token", None, None, None, "facts", 1.0, 10, 0.7, 1.0, 0.9, None, None, 1.0)], [])
    command = ["--pool", "token", "--output", str(path)]
    line = refused(monkeypatch, capsys, *command, "--conversations", "1", "--seed", "7")
    assert f"seed: there {2**34}, here 7" in line
    assert "sessions: there" in line
    # The same settings: nothing is missing, so that no server starts, and the tables are printed.
    monkeypatch.setattr(sys, "argv", ["accuracy", *command, "--conversations", "1", "--json"])
    accuracy.main()
    assert json.loads(capsys.readouterr().out)["cells"][0]["score"] == 1.0


def test_the_results_of_the_recall_suite_can_be_gone_on_with():
    """The file has every cell of the default arguments but that of the token pool, which is measured when missing."""
    parsed = options("--output", str(RESULTS / "accuracy-cpu.json"))
    sessions = accuracy.load_sessions(parsed)
    results = Results.open(parsed.output, accuracy.settings_of(parsed, sessions), {})
    assert set(keys_of(parsed)) - results.known <= {TOKEN}


def test_the_digest_of_what_is_asked_sees_every_part():
    one, two = recall.load(2, 2, 2**34)
    digests = {accuracy.digest_of(sessions) for sessions in ([one, two], [two, one], [one], [one, one])}
    assert len(digests) == 4
    assert accuracy.digest_of(recall.load(2, 2, 2**34)) == accuracy.digest_of([one, two])
