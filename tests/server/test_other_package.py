"""A feature that another package brings is served: its flag, reservation, gauge, conflict and line are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.launch import serve
from tests.models import make_llama
from tests.server.client import generate

pytestmark = [pytest.mark.server, pytest.mark.thorough]

FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--kv-pool", "ragged", "--kv-bytes", "32MiB"),
    *("--max-running-requests", "4", "--ragged-profile", "uniform", "--ragged-slab-dtype", "wide", "--enable-metrics"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Environment of a process in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    folder = site / "ballast-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ballast\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text(
        "[sgl_ragged.launch_features]\nballast = ballast:LAUNCH\n[sgl_ragged.serve_features]\nballast = ballast:SERVE\n"
    )
    paths = [site, Path(__file__).parent.parent / "other_package", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def run(installed: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=os.environ | installed, capture_output=True, text=True)


def layout(installed: dict[str, str], llama: Path, *flags: str) -> dict:
    done = show_layout(installed, llama, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def show_layout(installed: dict[str, str], llama: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run(
        installed,
        *("-m", "sgl_ragged.cli", "layout", "--model", str(llama), "--kv-bytes", "32MiB", "--dtype", "float32"),
        *("--slab-dtype", "wide", "--max-running-requests", "4", "--profile", "uniform", "--json", *flags),
    )


def test_it_joins_and_is_served(installed, llama, tmp_path):
    with serve(llama, *FLAGS, "--ragged-ballast", "4096", log=tmp_path / "log", env=installed) as server:
        assert len(generate(server, range(3, 300), 3).tokens) == 3
        ragged = httpx.get(f"{server.url}/server_info", timeout=60).json()["ragged"]
        assert ragged["ballast"] == 4096
        assert "requests carry 4096 bytes of ballast" in ragged["summary"]
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert any(line.startswith("sglang:ragged_ballast_bytes{") and line.endswith(" 4096.0") for line in
                   metrics.splitlines())  # fmt: skip
    loaded = layout(installed, llama, "--ballast", "4096")
    assert loaded["ballast"] == 4096
    assert loaded["rows_bytes"] == ragged["rows_bytes"] > 5 * 4096
    assert "--ragged-ballast 0 must be at least 1" in show_layout(installed, llama, "--ballast", "0").stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ragged-ballast-colour", "red"), "--ragged-ballast-colour paints ballast, and there is none"),
        (
            ("--ragged-ballast", "1", "--enable-mixed-chunk"),
            "--ragged-ballast is not supported with --enable-mixed-chunk: ballast would shift; drop one of the two",
        ),
    ],
)
def test_what_it_refuses_ends_the_start_in_one_line(installed, llama, flags, words):
    done = run(installed, "-m", "sglang.launch_server", "--model-path", str(llama), "--device", "cpu", *FLAGS, *flags)
    lines = [line for line in done.stderr.splitlines() if "sgl_ragged: " in line]
    assert done.returncode != 0
    assert len(lines) == 1, done.stderr[-2000:]
    assert words in lines[0]


def test_its_conflicts_are_in_the_table(installed):
    done = run(installed, "-m", "sgl_ragged.cli", "conflicts")
    assert "| `--ragged-ballast` | `--enable-mixed-chunk` | ballast would shift |  |" in done.stdout


def test_one_that_cannot_be_loaded_is_named(installed, llama, tmp_path):
    folder = tmp_path / "broken-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text("[sgl_ragged.launch_features]\nbroken = no_such_module:BROKEN\n")
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), installed["PYTHONPATH"]])}
    done = run(paths, "-m", "sgl_ragged.cli", "conflicts")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("sgl-ragged: feature broken (no_such_module:BROKEN) cannot")
