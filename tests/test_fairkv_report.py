"""`python -m benchmarks.fairkv.one_model`, and the figures it shows, by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fairkv import one_model
from benchmarks.fairkv.copying import MODES
from benchmarks.fairkv.evenness import busy_limit, compare_modes, evenness
from sgl_ragged.fairkv.cost import CostModel
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.profiles.profile import profile_kept
from tests.models import make_config, make_profile


@pytest.fixture
def model(tmp_path):
    return make_config(tmp_path)


def run(monkeypatch, model, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fairkv", "--model", str(model), "--profile", "uniform", *args])
    one_model.main()


def test_figures_by_hand():
    """Layer 0: 208 | 64 of 272 tokens, split 144 | 128. Layer 1: 32 | 240 of 272, split 128 | 144."""
    kept = np.array([[192, 16, 48, 16], [16, 16, 16, 224]])
    cost = CostModel(hidden=4, head_dim=2, q_per_kv=1, segment=16, batch=3, context=16, other_bytes=2000)
    assert cost.place_bytes == 64
    none, split = plan_placement(kept, 2, "none"), plan_placement(kept, 2, "split")
    plain, even = evenness(none, none, cost), evenness(split, none, cost)
    assert plain.busy == 272 / 448
    assert plain.busy_worst == 136 / 240
    assert plain.busy_whole == 272 / 304
    assert (plain.busy_net, plain.capacity, plain.extra_bytes, plain.speedup) == (plain.busy, 1.0, 0, 1.0)
    assert (even.places, even.extra_bytes) == (3, 2 * 64)
    assert even.busy == 272 / 288
    assert even.busy_whole == 1.0
    # Three requests of one segment, 8 bytes of key and value a token: 24 bytes for each kept token.
    assert even.busy_net == 272 * 24 / (288 * 24 + 128)
    assert plain.busy_step == pytest.approx((272 * 24 + 2 * 2 * 64 + 1000) / (448 * 24 + 2 * 2 * 64 + 1000))
    assert even.capacity == 304 / 272
    assert even.speedup == (448 * 24 + 2 * 2 * 64 + 1000) / (288 * 24 + 2 * 3 * 64 + 1000)
    assert busy_limit(kept, 2) == 272 / 288


def test_as_json(model, monkeypatch, capsys):
    profile = make_profile(model, model / "p.safetensors")
    flags = ["--ratio", "0.3", "--profile", str(model / "p.safetensors"), "--batch", "8", "--context", "4096"]
    run(monkeypatch, model, *flags, "--json")
    report = json.loads(capsys.readouterr().out)
    kept = profile_kept(profile, 0.3, 256)
    other = 2 * 256 * (3 * 3 * 256 + 512)
    cost = CostModel(hidden=256, head_dim=64, q_per_kv=2, segment=256, batch=8, context=4096, other_bytes=other)
    assert CostModel(**report["cost"]) == cost
    assert set(report["tp"]) == {"2", "4"}
    for ranks, found in report["tp"].items():
        expected = compare_modes(kept, int(ranks), 1, cost)
        assert set(found["modes"]) == set(MODES) == set(expected)
        assert {mode: figures["busy"] for mode, figures in found["modes"].items()} == {
            mode: entry.busy for mode, entry in expected.items()
        }
        assert found["busy_limit"] == busy_limit(kept, int(ranks)) >= found["modes"]["split"]["busy"]
        assert found["modes"]["split"]["speedup"] >= found["modes"]["permute"]["speedup"] >= 1.0


def test_as_tables_and_a_plot(model, monkeypatch, capsys):
    plot = model / "ranks.png"
    run(monkeypatch, model, "--tp", "2", "--extra-places", "2", "--plot", str(plot))
    shown = capsys.readouterr().out
    assert "2 ranks, batch 32, context 16384" in shown
    assert "Arithmetic, not times." in shown
    for mode in MODES:
        assert mode in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tp", "3"), "4 heads cannot be placed on 3 ranks"),
        (("--tp", "8"), "4 heads cannot be placed on 8 ranks"),
        (("--extra-places", "-1"), "extra places per rank must be at least 0"),
        (("--batch", "0"), "batch must be at least 1"),
        (("--context", "0"), "context must be at least 1"),
        (("--ratio", "0"), "outside (0, 1]"),
        (("--plot", "/nowhere/ranks.png"), "cannot write /nowhere/ranks.png"),
    ],
)
def test_bad_input_ends_with_one_line(model, monkeypatch, capsys, args, words):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, model, *args)
    assert words in str(ended.value.code)
    assert "\n" not in str(ended.value.code)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("key", "words"), [("num_key_value_heads", "none of 2, 4 and 8 ranks divide 1 heads"), ("vocab_size", "it lacks")]
)
def test_models_that_do_not_fit(model, monkeypatch, key, words):
    config = json.loads((model / "config.json").read_text())
    config = {k: v for k, v in config.items() if k != key} | ({key: 1} if key == "num_key_value_heads" else {})
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, model)
    assert words in str(ended.value.code)


def test_the_page_says_what_was_found():
    """benchmarks/fairkv/README.md against benchmarks/results/fairkv.json, which is rounded, too, to four digits."""
    root = Path(__file__).parent.parent
    page = (root / "benchmarks" / "fairkv" / "README.md").read_text()
    profiles = json.loads((root / "benchmarks" / "results" / "fairkv.json").read_text())["profiles"]

    def figures(text: str) -> list[float]:
        return [float(word) for word in re.findall(r"\d\.\d+", text)]

    def columns(figure: str, mode: str, names: list[str]) -> list[list[float]]:
        return [[profiles[name][ranks]["modes"][mode][figure] for name in names] for ranks in ("2", "4", "8")]

    rows = [("`split`, as planned", "busy", "split"), ("busy, extra weights lost: `split`", "busy_net", "split")]
    rows += [(f"capacity: `{mode}`", "capacity", mode) for mode in ("permute", "split")]
    rows += [(f"speed-up: `{mode}`", "speedup", mode) for mode in ("permute", "copy", "split")]
    for label, figure, mode in rows:
        shown = figures(re.search(rf"^\| {re.escape(label)} (\|.+)$", page, re.MULTILINE)[1])
        found = [f(column) for column in columns(figure, mode, list(profiles)) for f in (min, np.median, max)]
        half = 0.0005 if figure.startswith("busy") else 0.005
        np.testing.assert_allclose(shown, found, rtol=0, atol=half + 0.0001, err_msg=label)
    sentence = re.search(r"By bytes, `split` has (.+?) for Llama-3.1-8B at TP2, TP4 and TP8", page, re.DOTALL)[1]
    llama = [name for name in profiles if name.endswith("llama-3.1-8b-instruct/layer")]
    found = [f(column) for column in columns("speedup", "split", llama) for f in (min, max)]
    np.testing.assert_allclose(figures(sentence), found, rtol=0, atol=0.0051)
