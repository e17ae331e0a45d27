"""The command line of `benchmarks.accuracy`, and the combinations that it refuses."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from benchmarks.accuracy import budgets
from benchmarks.accuracy.cell import TOKEN, Key
from benchmarks.accuracy.prompts import MODES, PromptFormat
from benchmarks.demo import MODEL
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.options import check_counts, flags, new_parser
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.sizing import parse_bytes
from sgl_ragged.profiles.budgets import check_budgets, check_segment
from sgl_ragged.scorers import get_scorer

SUITES = ("recall", "ruler", "scbench")
POOLS = ("token", "ragged")
RESULTS = Path(__file__).parent.parent / "results"
PROFILES = Path(__file__).parent.parent / "recall" / "profiles"

SCORERS = ("keydiff", "expected_attention", "h2o", "snapkv", "tova", "value_key_norm", "key_norm", "streaming")
RAGGED = {
    "recall": {
        "scorer": list(SCORERS),
        "budgets": ["uniform", "coverage-all", "coverage"],
        "ratio": [0.5, 0.3, 0.2, 0.1],
    },
    "others": {"scorer": ["keydiff"], "budgets": ["auto"], "ratio": [0.5, 0.3]},
}
"""Ragged servers by default. The recall model is small enough for all of them, and calibrated here."""

OF_RECALL = {"conversations": 20, "questions": 10, "seed": 2**34, "profiles": PROFILES, "calibrate_at": 0.3}
OF_FILES = ("data", "tasks", "limit")
OWN_FLAGS = {
    "--model-path": "--model",
    "--model": "--model",
    "--kv-pool": "--pool",
    "--kv-bytes": "--kv-bytes",
    "--max-running-requests": "--max-running-requests",
    "--ragged-ratio": "--ratio",
    "--ragged-segment": "--segment",
    "--ragged-scorer": "--scorer",
    "--ragged-profile": "--budgets",
    "--skip-tokenizer-init": "nothing: answers are scored as text",
}
"""Flags of a server that have an option here. If they were given as server flags, cells would have wrong names."""


def parser(description: str) -> argparse.ArgumentParser:
    """Options without a value are None, so that `complete` can refuse those of another suite or pool."""
    made = new_parser("accuracy", description)
    asked = made.add_argument_group("what is asked")
    asked.add_argument("--suite", choices=SUITES, default="recall", help="[recall]")
    asked.add_argument("--data", type=Path, metavar="PATH", help="ruler, scbench: where their files are")
    asked.add_argument("--tasks", nargs="+", metavar="T", help="ruler, scbench: some tasks only [all that are there]")
    asked.add_argument("--limit", type=int, metavar="N", help="ruler, scbench: the first N sessions of each task")
    asked.add_argument("--conversations", type=int, help="recall: how many [20]")
    asked.add_argument("--questions", type=int, help="recall: of each conversation [10]")
    asked.add_argument("--seed", type=int, help="recall: of the conversations [2**34]")
    asked.add_argument("--mode", choices=MODES, help="[scbench: turns; others: requests]")
    asked.add_argument("--answers", choices=("golden", "own"), help="turns: what prompts hold of earlier ones [golden]")
    asked.add_argument("--chat", action="store_true", help="messages in the model's chat template [plain text]")
    asked.add_argument("--max-length", type=int, metavar="N", help="tokens of a prompt [what the first server takes]")
    servers = made.add_argument_group("servers")
    servers.add_argument("--model", metavar="FOLDER", help="[the recall model]")
    servers.add_argument("--pool", nargs="+", choices=POOLS, default=list(POOLS), help="[token ragged]")
    servers.add_argument(
        "--ratio", nargs="+", type=float, metavar="R", help="[recall: 0.5 0.3 0.2 0.1; others: 0.5 0.3]"
    )
    servers.add_argument("--scorer", nargs="+", metavar="NAME", help="[recall: eight; others: keydiff]")
    servers.add_argument(
        "--budgets",
        nargs="+",
        metavar="B",
        help="uniform, auto or a profile FILE, in whose name {scorer} is replaced; for the recall model also "
        f"{', '.join(budgets.CALIBRATED)} [recall: uniform coverage-all coverage; others: auto]",
    )
    servers.add_argument("--segment", type=int, default=256, metavar="S", help="[256]")
    servers.add_argument("--profiles", type=Path, help="recall: folder of SCORER-KIND.safetensors")
    servers.add_argument("--calibrate-at", type=float, metavar="R", help="recall: ratio of new profiles [0.3]")
    servers.add_argument("--kv-bytes", default="160MiB", help="KV budget of every server [160MiB]")
    servers.add_argument("--max-running-requests", type=int, default=10, metavar="N", help="sessions at once [10]")
    servers.add_argument("--server-args", default="", metavar="TEXT", help="further flags of all servers")
    servers.add_argument("--ragged-args", default="", metavar="TEXT", help="further flags of the ragged ones")
    made.add_argument("--output", type=Path, metavar="FILE.json", help="also .png beside it [benchmarks/results/...]")
    made.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    return made


def complete(options: argparse.Namespace) -> None:
    """Fill in defaults, which depend on the suite.

    Raises:
        SettingsError: options that do not go together, or numbers out of range.
    """
    _check_suite(options)
    _check_numbers(options)
    _check_prompts(options)
    _check_ragged(options)
    _check_flags(options)
    if options.output is None:
        name = "cpu" if options.suite == "recall" else f"{options.suite}-{Path(options.model).resolve().name}"
        options.output = RESULTS / f"accuracy-{name}.json"
    if options.output.suffix != ".json":
        raise SettingsError(f"--output {options.output} must end in .json")


def form_of(options: argparse.Namespace) -> PromptFormat:
    return PromptFormat(options.mode, own=options.answers == "own", chat=options.chat)


def keys_of(options: argparse.Namespace) -> dict[Key, str]:
    """The servers in their order, each with its value of --budgets; the token pool has none."""
    keys = {TOKEN: ""} if "token" in options.pool else {}
    if "ragged" in options.pool:
        for scorer in options.scorer:
            for name in options.budgets:
                keys |= {Key("ragged", scorer, budgets.label(name), ratio): name for ratio in options.ratio}
    return keys


def _check_suite(options: argparse.Namespace) -> None:
    if options.suite == "recall":
        if given := [name for name in OF_FILES if getattr(options, name) is not None]:
            raise SettingsError(f"{flags(given)}: for --suite ruler and scbench; recall draws its own texts")
        if options.chat:
            raise SettingsError("--chat: the recall suite's texts hold the markers of their chat already")
        options.model = options.model or str(MODEL)
        for name, value in OF_RECALL.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        return
    if missing := [name for name in ("data", "model") if getattr(options, name) is None]:
        raise SettingsError(f"--suite {options.suite} needs {flags(missing)}")
    if given := [name for name in ("conversations", "questions", "seed") if getattr(options, name) is not None]:
        raise SettingsError(f"{flags(given)}: for --suite recall only")
    if not budgets.is_recall_model(options.model) and (
        given := [name for name in ("profiles", "calibrate_at") if getattr(options, name) is not None]
    ):
        raise SettingsError(f"{flags(given)}: for the recall model only; others are calibrated by python -m calib run")
    if not options.data.exists():
        raise SettingsError(f"--data {options.data} does not exist")


def _check_numbers(options: argparse.Namespace) -> None:
    check_counts(options, "limit", "conversations", "questions", "max_length", "max_running_requests")
    try:
        parse_bytes(options.kv_bytes)
        check_segment(options.segment)
    except RaggedConfigError as error:
        raise SettingsError(f"--kv-bytes, --segment: {error}") from None


def _check_prompts(options: argparse.Namespace) -> None:
    options.mode = options.mode or ("turns" if options.suite == "scbench" else "requests")
    if options.suite == "ruler" and options.mode == "turns":
        raise SettingsError("--mode turns: ruler asks one question about each text, so no turn follows; use requests")
    if options.mode == "requests" and options.answers == "own":
        raise SettingsError("--answers own belongs to --mode turns: prompts of requests hold no answers")
    options.answers = options.answers or "golden"


def _check_ragged(options: argparse.Namespace) -> None:
    if len(set(options.pool)) < len(options.pool):
        raise SettingsError("--pool: each of token and ragged once")
    defaults = RAGGED["recall" if options.suite == "recall" else "others"]
    given = [name for name in defaults if getattr(options, name) is not None]
    if "ragged" not in options.pool and (given or options.ragged_args):
        raise SettingsError(f"{flags(given or ['ragged_args'])}: for the ragged pool, which is not among --pool")
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        elif len(set(getattr(options, name))) < len(getattr(options, name)):
            raise SettingsError(f"{flags([name])}: each value once")
    if options.profiles is None:
        options.profiles = PROFILES
    if options.calibrate_at is None:
        options.calibrate_at = OF_RECALL["calibrate_at"]
    try:
        for ratio in (*options.ratio, options.calibrate_at):
            check_budgets(ratio, options.segment)
        for scorer in options.scorer:
            get_scorer(scorer)
    except RaggedConfigError as error:
        raise SettingsError(str(error)) from None
    if "ragged" in options.pool:
        budgets.check_names(options.budgets, options.scorer, options.model)


def _check_flags(options: argparse.Namespace) -> None:
    for name in ("server_args", "ragged_args"):
        try:
            words = shlex.split(getattr(options, name))
        except ValueError as error:
            raise SettingsError(f"{flags([name])}: {error}") from None
        for word in words:
            if (flag := word.partition("=")[0]) in OWN_FLAGS:
                raise SettingsError(f"{flags([name])}: {flag} is set by {OWN_FLAGS[flag]}")
