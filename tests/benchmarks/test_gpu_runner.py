"""How the GPU benchmark runs its blocks: in processes that may fail, within a time. No GPU is used."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_blocks import machine, runner
from benchmarks.gpu_blocks.record import MEASURED, Record

# What the script does when it is started for some blocks: decode dies after one case, extend hangs.
CHILD = """
import json, pathlib, sys, time
options = dict(zip(sys.argv[1:], sys.argv[2:]))
if "--correctness-case" in options:
    name = options["--correctness-case"]
    if name.startswith("float32"):
        sys.exit("out of luck")
    print("noise")
    print(json.dumps([{"case": name, "check": "decode", "passed": True}]))
    sys.exit(0)
path = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "gpu.json"
for block in sys.argv[sys.argv.index("--blocks") + 1].split(","):
    document = json.loads(path.read_text())
    status = {"decode": "running", "extend": "running"}.get(block, "done")
    document["blocks"][block] = {"status": status, "rows": [{"case": "first"}], "skipped": []}
    path.write_text(json.dumps(document))
    if block == "decode":
        sys.exit(3)
    if block == "extend":
        time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


def run(script, tmp_path, monkeypatch, blocks: list[str], seconds: float = 420) -> tuple[int, dict]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = SimpleNamespace(
        correctness_case=None, child=False, output=tmp_path / "out", blocks=blocks, seconds=seconds
    )
    status = runner.run(options, script)
    return status, json.loads((tmp_path / "out" / "gpu.json").read_text())


def test_a_block_that_dies_keeps_its_rows_and_the_others_go_on(script, tmp_path, monkeypatch):
    status, document = run(script, tmp_path, monkeypatch, ["bandwidth", "decode", "append"])
    blocks = document["blocks"]
    assert status == 1
    assert document["kind"] == MEASURED
    assert blocks["decode"]["status"] == "failed"
    assert "status 3" in blocks["decode"]["reason"]
    assert blocks["decode"]["rows"] == [{"case": "first"}]
    assert blocks["bandwidth"]["status"] == blocks["append"]["status"] == "done"


def test_a_block_that_hangs_is_ended(script, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.5)
    monkeypatch.setattr(runner, "MINIMUM", {})
    monkeypatch.setattr(runner, "LEAST", 0.1)
    status, document = run(script, tmp_path, monkeypatch, ["extend"], seconds=1)
    assert status == 1
    assert document["blocks"]["extend"]["reason"] == "its process did not end in time"


def test_a_correctness_case_that_dies_is_a_failed_check(script, tmp_path, monkeypatch, capfd):
    status, document = run(script, tmp_path, monkeypatch, ["correctness"])
    rows = document["blocks"]["correctness"]["rows"]
    assert status == 1
    assert {row["case"].split("-")[0] for row in rows if not row["passed"]} == {"float32"}
    assert {row["case"].split("-")[0] for row in rows if row["passed"]} == {"bfloat16", "float16"}
    assert "out of luck" in rows[-1]["reason"]
    assert "out of luck" in capfd.readouterr().err


def test_what_would_not_fit_the_time_is_skipped_and_said(script, tmp_path, monkeypatch):
    status, document = run(script, tmp_path, monkeypatch, ["decode"], seconds=20)
    assert status == 0
    assert document["blocks"]["decode"]["status"] == "skipped"
    assert "were left" in document["blocks"]["decode"]["reason"]


def test_child_records_rows_ceilings_and_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    monkeypatch.setattr(machine, "describe", lambda device: {"gpu": "none"})

    def bandwidth(context):
        context.ceilings["copy_bytes_per_s"] = 2.0
        yield {"case": "copy"}

    def decode(context):
        assert context.ceilings == {"copy_bytes_per_s": 2.0}
        assert context.memory == 930
        context.skip("large", "does not fit")
        yield {"case": "small"}
        raise RuntimeError("illegal\nmemory access")

    monkeypatch.setattr(runner, "BLOCKS", {"bandwidth": bandwidth, "decode": decode})
    record = Record(tmp_path)
    record.start(MEASURED)
    assert runner._run_blocks(["bandwidth"], record, 1e12) == 0
    assert runner._run_blocks(["decode"], record, 1e12) == 1
    document = record.read()
    assert document["machine"] == {"gpu": "none"}
    found = document["blocks"]["decode"]
    assert (found["status"], found["reason"]) == ("failed", "RuntimeError: illegal")
    assert found["rows"] == [{"case": "small"}]
    assert found["skipped"] == [{"case": "large", "reason": "does not fit"}]


def test_without_a_gpu_it_says_so(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = SimpleNamespace(correctness_case=None, child=False)
    assert runner.run(options, script) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_case_that_goes_on_is_ended_when_all_time_is_up(script, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 1000.0)
    monkeypatch.setattr(runner, "MINIMUM", {})
    monkeypatch.setattr(runner, "LEAST", 1.0)
    status, document = run(script, tmp_path, monkeypatch, ["extend"], seconds=4)
    assert status == 1
    assert document["blocks"]["extend"]["reason"] == "its process did not end in time"
