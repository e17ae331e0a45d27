"""The console script."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from sgl_ragged import cli
from sgl_ragged.profiles.head_statistics import WATCHED
from sgl_ragged.profiles.profile import load_profile, profile_kept
from tests.models import make_config, make_profile

WIDE = ("--slab-dtype", "wide")


@pytest.fixture
def model(tmp_path):
    return make_config(tmp_path)


def run(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", *args])
    cli.main()


def test_layout_as_json(model, monkeypatch, capsys):
    run(monkeypatch, "layout", "--model", str(model), "--kv-bytes", "64MiB", "--ratio", "0.3", *WIDE, "--json")
    plan = json.loads(capsys.readouterr().out)
    kept = np.array(plan["kept"])
    assert kept.shape == (3, 4)
    assert plan["slab_bytes"] == int(kept.sum()) * 2 * 64 * 2
    assert plan["total_bytes"] == plan["num_slots"] * plan["slab_bytes"] + plan["rows_bytes"] <= 64 * 2**20
    assert plan["max_total_tokens"] == (plan["num_slots"] - 1) * 256 > 2.5 * plan["full_tokens"]


def test_a_gpu_stands_for_a_budget(model, monkeypatch, capsys):
    run(monkeypatch, "layout", "--model", str(model), "--gpu", "24GiB", "--tp-size", "2", *WIDE, "--json")
    out, err = capsys.readouterr()
    # SGLang's defaults for 24 GiB: chunks of 2,048 tokens; one eighth of a GiB for each rank.
    reserved = (512 + 1.5 * 2048 + 2 * 128) * 2**20
    config = AutoConfig.from_pretrained(model)
    weights = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    shown = json.loads(out)
    budget = int(24 * 2**30 - reserved - weights)
    assert budget - shown["slab_bytes"] < shown["total_bytes"] <= budget
    assert err.startswith("estimate for 24.0 GiB of GPU memory: 20.2 GiB for KV")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "give --kv-bytes, or --gpu"),
        (("--gpu", "24GB", "--kv-bytes", "1GB"), "give --kv-bytes, or --gpu"),
        (("--gpu", "2GiB"), "--gpu holds no KV cache"),
    ],
)
def test_a_budget_is_given_once(model, monkeypatch, flags, line):
    with pytest.raises(SystemExit, match=line):
        run(monkeypatch, "layout", "--model", str(model), *flags)


def test_calibrate_is_the_calibrator(monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "call", lambda command: asked.append(command) or 3)
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "calibrate", "--model", "m", "-o", "p")
    assert end.value.code == 3
    assert asked[0][-5:] == ["run", "--model", "m", "-o", "p"]


def test_unknown_flags_are_refused(model, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "layout", "--model", str(model), "--kv-bites", "1")
    assert "unrecognized arguments: --kv-bites 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked", ["layout", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("check", "conflicts"))]
)
def test_the_answer_is_all_that_it_says(model, asked):
    """As a program of its own: here SGLang has been imported, and what it warns of has been said."""
    program = "import sys; from sgl_ragged.cli import main; main()"
    more = ("--model", str(model), "--kv-bytes", "64MiB") if asked == "layout" else ()
    done = subprocess.run([sys.executable, "-c", program, asked, *more], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = {"layout": "virtual tokens", "check": "tested with this plugin", "conflicts": "| `--ragged-history` |"}
    assert words[asked] in done.stdout


def test_only_warnings_of_imports_are_silenced(caplog):
    def warn(module: str) -> None:
        warnings.warn_explicit(f"from {module}", UserWarning, f"{module}.py", 1, module=module)
        logging.getLogger(module).warning("from %s", module)

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        with cli.quiet_imports():
            for module in ("sglang.srt.configs", "torch", "sglangs", "sgl_ragged.launch.plan"):
                warn(module)
            logging.getLogger("sglang.srt.configs").error("an error")
        warn("sglang.kernels")
    kept = ["from sglangs", "from sgl_ragged.launch.plan"]
    assert [str(warning.message) for warning in raised] == [*kept, "from sglang.kernels"]
    assert [record.getMessage() for record in caplog.records] == [*kept, "an error", "from sglang.kernels"]


def test_layout_says_what_the_server_would_do(model, monkeypatch, capsys):
    """A profile, and queries of every token in open segments."""
    profile = make_profile(model, model / "p.safetensors", scorer="h2o")
    flags = ["--model", str(model), "--kv-bytes", "64MiB", "--ratio", "0.3", "--scorer", "h2o", *WIDE, "--json"]
    run(monkeypatch, "layout", *flags, "--profile", str(model / "p.safetensors"))
    plan = json.loads(capsys.readouterr().out)
    assert plan["kept"] == profile_kept(profile, 0.3, 256).tolist()
    run(monkeypatch, "layout", *flags, "--max-running-requests", "7")
    # Keys and values, and 2 query heads, of each token.
    assert json.loads(capsys.readouterr().out)["open_page_tokens"] == plan["slab_bytes"] // (3 * 4 * 64 * 2 * (2 + 2))
    run(monkeypatch, "layout", *flags, "--max-running-requests", "7", "--kv-cache-dtype", "fp8_e4m3")
    narrow = json.loads(capsys.readouterr().out)
    # Keys and values take a byte, queries beside them two as before.
    assert narrow["open_page_tokens"] == narrow["slab_bytes"] // (3 * 4 * 64 * (2 + 2 * 2))
    assert narrow["slab_bytes"] == plan["slab_bytes"] // 2


def test_layout_of_codes_counts_bytes_and_tokens(model, monkeypatch, capsys):
    """Of 64 dimensions in K8V4 a key takes 64 bytes, a value 32 and their scales 4."""
    flags = ["layout", "--model", str(model), "--kv-bytes", "64MiB", "--ratio", "0.25", "--slab-dtype"]
    run(monkeypatch, *flags, "k8v4", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert plan["slab_bytes"] == int(np.sum(plan["kept"])) * 100
    assert plan["kept_bytes_ratio"] == pytest.approx(0.25, abs=0.005)
    assert plan["kept_ratio"] == pytest.approx(plan["kept_bytes_ratio"] * 2.56)
    run(monkeypatch, *flags, "k8v4")
    assert f"(mean share {plan['kept_ratio']:.4f} in k8v4, {plan['kept_bytes_ratio']:.4f} of the bytes)" in (
        capsys.readouterr().out
    )
    run(monkeypatch, *flags[:5], "--ratio", "0.6", "--slab-dtype", "int8")
    assert "of the bytes: every token is kept)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="rounded twice; use wide"):
        run(monkeypatch, *flags, "k8v4", "--kv-cache-dtype", "fp8_e4m3")


def test_layout_of_a_bounded_history(model, monkeypatch, capsys):
    flags = ["layout", "--model", str(model), "--kv-bytes", "64MiB", "--max-running-requests", "7", "--history"]
    run(monkeypatch, *flags, "1024", "--json")
    plan = json.loads(capsys.readouterr().out)
    # Four segments that it sees, and the pages of its open one and their stage.
    pages = -(-256 // plan["open_page_tokens"]) + 1
    assert plan["most_request_bytes"] == (4 + pages) * plan["slab_bytes"] + plan["rows_bytes"] // 8
    run(monkeypatch, *flags, "1024")
    assert f"requests see 1024 tokens of their histories and hold at most {plan['most_request_bytes']} bytes" in (
        capsys.readouterr().out
    )
    with pytest.raises(SystemExit, match="--ragged-history 1000 must be a multiple"):
        run(monkeypatch, *flags, "1000")


def test_layout_with_a_draft_model(model, monkeypatch, capsys):
    flags = ["layout", "--model", str(model), "--kv-bytes", "64MiB", "--max-running-requests", "7", *WIDE]
    run(monkeypatch, *flags, "--json")
    assert json.loads(capsys.readouterr().out)["draft_bytes_per_token"] is None
    flags += ["--speculative-algorithm", "STANDALONE"]
    with pytest.raises(SystemExit, match="add --speculative-draft-model-path"):
        run(monkeypatch, *flags)
    run(monkeypatch, *flags, "--speculative-draft-model-path", str(model), "--json")
    plan = json.loads(capsys.readouterr().out)
    assert plan["draft_bytes_per_token"] == 3 * 4 * 64 * 2 * 2
    page = plan["slab_bytes"] + 256 * plan["draft_bytes_per_token"]
    assert plan["total_bytes"] == plan["num_slots"] * page + plan["rows_bytes"] <= 64 * 2**20
    run(monkeypatch, *flags, "--speculative-draft-model-path", str(model))
    assert f"chains of 4 drafts by {model.name}, 3072 bytes for each virtual token" in capsys.readouterr().out
    (model / "windowed").mkdir()
    config = json.loads((model / "config.json").read_text()) | {"num_kv_shared_layers": 1}
    (model / "windowed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=r"as a draft model, .* share keys and values"):
        run(monkeypatch, *flags, "--speculative-draft-model-path", str(model / "windowed"))


def test_layout_of_retrieval(model, monkeypatch, capsys):
    make_profile(model, model / "roles.safetensors", pivots=((0, 1), (1, 2)))
    flags = ["layout", "--model", str(model), "--kv-bytes", "64MiB", "--max-running-requests", "7", "--ratio", "0.3"]
    flags += ["--profile", str(model / "roles.safetensors")]
    run(monkeypatch, *flags, "--json")
    without = json.loads(capsys.readouterr().out)
    flags += ["--reservoir", "1GiB"]
    run(monkeypatch, *flags, "--overlay", "32", "--json")
    plan = json.loads(capsys.readouterr().out)
    # All heads but the pivots are watched for: 32 rows each; and 2 query heads of each pivot for 8 steps.
    assert plan["overlay_bytes"] == 10 * (32 * 2 * 64 * 2 + 4) + 2 * 8 * 2 * (64 * 2 + 4)
    assert plan["rows_bytes"] == without["rows_bytes"] + 8 * plan["overlay_bytes"]
    assert (plan["pivots"], plan["reservoir_bytes"]) == ([[0, 1], [1, 2]], 2**30)
    assert (plan["kept"][0][1], plan["kept"][1][2]) == (256, 256)
    assert np.mean(plan["kept"]) <= 0.3 * 256
    run(monkeypatch, *flags)
    assert "2 pivots watch for 10 heads, which can be given 128 tokens each" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--ragged-overlay has .* add --ragged-reservoir"):
        run(monkeypatch, *flags[:-2], "--overlay", "32")
    blind = load_profile(model / "roles.safetensors")
    statistics = dict(blind.statistics) | {WATCHED: np.zeros_like(blind.statistics[WATCHED])}
    replace(blind, statistics=MappingProxyType(statistics)).save(model / "blind.safetensors")
    with pytest.raises(SystemExit, match=r"2 pivots of .* foresee nothing"):
        run(monkeypatch, *flags, "--profile", str(model / "blind.safetensors"))
    with pytest.raises(SystemExit, match="equal budgets come without"):
        run(monkeypatch, *flags, "--profile", "uniform")


def test_layout_as_a_line(model, monkeypatch, capsys):
    flags = ["layout", "--model", str(model), "--kv-bytes", "64MiB"]
    run(monkeypatch, *flags, *WIDE)
    assert "mean share 0.5000" in capsys.readouterr().out
    run(monkeypatch, *flags)
    shares = re.search(r"mean share (.*) in k6v6, (.*) of the bytes", capsys.readouterr().out)
    assert [float(share) for share in shares.groups()] == pytest.approx([0.758, 0.3], abs=0.01)


def test_layout_warns_where_nothing_is_gained(model, monkeypatch, capsys):
    flags = ["--model", str(model), "--kv-bytes", "64MiB", "--json", "--max-running-requests", "64"]
    run(monkeypatch, "layout", *flags)
    assert capsys.readouterr().err == ""
    run(monkeypatch, "layout", *flags, "--ratio", "1", "--scorer", "snapkv")
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert plan["max_total_tokens"] < plan["full_tokens"]
    assert (
        f"holds {plan['max_total_tokens']} tokens, an uncompressed cache would hold {plan['full_tokens']}" in shown.err
    )
    assert "at ratio 1 nothing is compressed" in shown.err


def test_a_config_without_architecture_is_refused(model, monkeypatch):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(SystemExit, match="names no architectures"):
        run(monkeypatch, "layout", "--model", str(model), "--kv-bytes", "1GiB")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "/nowhere", "--kv-bytes", "1GiB"), "there is no such folder or config.json"),
        (("--model", "nobody/nothing", "--kv-bytes", "1GiB"), "`hf download nobody/nothing config.json`"),
        (("--model", "MODEL", "--kv-bytes", "1KiB"), "too small"),
        (("--model", "MODEL", "--kv-bytes", "1GiB", "--ratio", "2"), "outside (0, 1]"),
        (("--model", "MODEL", "--kv-bytes", "1GiB", "--ratio", "0.05", *WIDE), "a ratio of 0.0625; use that ratio"),
        (("--model", "MODEL", "--kv-bytes", "1e999"), "cannot read '1e999' as a number of bytes"),
        (
            ("--model", "MODEL", "--kv-bytes", "1GiB", "--max-running-requests", "0"),
            "--max-running-requests 0 must be at least 1",
        ),
        (("--model", "MODEL", "--kv-bytes", "1GiB", "--max-total-tokens", "255"), "at least 256, or take a smaller"),
        (("--model", "MODEL", "--kv-bytes", "1GiB", "--profile", "MODEL"), "is a directory; give the .safetensors"),
    ],
)
def test_bad_input_ends_with_one_line(model, monkeypatch, args, words):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "layout", *(str(model) if arg == "MODEL" else arg for arg in args))
    assert words in str(ended.value.code)
    assert "\n" not in str(ended.value.code)
