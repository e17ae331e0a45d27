"""From a model nobody has seen to a served profile: `python -m calib run`, then the server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.harness.launch import Server
from calib.codebook import PER_QUERY_HEAD
from calib.output_error import error_curves, left_over, query_positions, weighed
from sgl_ragged import cli
from sgl_ragged.features.retrieval.roles import head_roles
from sgl_ragged.fitting.references import References
from sgl_ragged.profiles.codebook import CODEBOOK, MASSES, QUERIES, ROPE
from sgl_ragged.profiles.head_statistics import HEAD_STATISTICS
from sgl_ragged.profiles.profile import HELD_OUT, Profile, load_profile, profile_kept
from sgl_ragged.profiles.quality import MeasuredQuality
from sgl_ragged.profiles.reference import LIKELIEST
from sgl_ragged.scorers import rank_positions
from sgl_ragged.verify.comparison import DECODED
from sgl_ragged.verify.prompts import BUILT_IN
from tests.character_model import character_tokenizer
from tests.models import make_profile, make_qwen3
from tests.oracle import Oracle
from tests.server.client import flush, generate

pytestmark = pytest.mark.server

SEGMENT, RATIO = 128, 0.4

CONTEXT, LONGEST = 640, 632
"""Tokens of the model's context, and of the longest sample that is recorded."""


def test_calibrate_and_serve_a_qwen3(request, tmp_path, servers, monkeypatch, capsys):
    model = make_qwen3(tmp_path / "qwen3", max_position_embeddings=CONTEXT)
    character_tokenizer().save_pretrained(model)
    rng = np.random.default_rng(0)
    data = tmp_path / "samples.jsonl"
    # The last one is longer than the model's context.
    lengths = (400, 460, 520, 700)
    samples = [
        {"task": "ab"[n % 2], "input_ids": rng.integers(3, 512, size).tolist()} for n, size in enumerate(lengths)
    ]
    data.write_text("\n".join(map(json.dumps, samples)))
    flags = ["--model", model, "--dtype", "float32", "--data", data, "--segment", SEGMENT, "--ratio", RATIO]
    flags += ["--scorer", "keydiff", "expected_attention", "gate", "-o", tmp_path / "{scorer}.safetensors"]
    command = [sys.executable, "-m", "calib", "run", *map(str, flags)]
    if request.config.getoption("thorough"):
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=400)
    else:
        done = servers.run([*command, "--json"], timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = {report["scorer"]: report for report in json.loads(done.stdout)}
    profile = load_profile(tmp_path / "keydiff.safetensors")
    assert reports["keydiff"]["digest"] == profile.digest()
    assert profile.coverage.shape == (2, 2, SEGMENT // 16)
    assert (np.diff(profile.coverage) >= 0).all()
    assert profile.tasks == ("a", "b", "a", "b")
    assert set(HEAD_STATISTICS) <= set(profile.statistics)
    check_reference(model, profile)
    # 32 tokens of each sample, three query heads.
    assert profile.statistics[QUERIES].shape == (2, 2, 3 * PER_QUERY_HEAD, 128)
    assert np.isfinite(profile.statistics[MASSES]).all()
    assert head_roles(profile, 1).watched_by.max() == 0
    expected = load_profile(tmp_path / "expected_attention.safetensors")
    assert expected.statistics["query_covariance"].shape == (2, 2, 3, 128, 128)
    assert expected.statistics["rope_frequencies"].shape == (2, 1, 64)
    gate = load_profile(tmp_path / "gate.safetensors")
    assert gate.statistics["skip"].dtype == np.float16
    # Attention at random cannot be foreseen, but the best choice covers most.
    columns = dict(zip(HELD_OUT, gate.held_out.T, strict=True))
    assert (columns["best coverage"] >= columns["coverage"]).all()
    assert (columns["best coverage"] >= columns["coverage of keydiff"]).all()
    gate.save(tmp_path / "trained.safetensors")

    work = tmp_path / "all.safetensors.recordings"
    if request.config.getoption("thorough"):
        # Hidden states of a layer at a time make the same gates.
        lengths = [min(len(sample["input_ids"]), LONGEST) for sample in samples]
        states = sum(2 * 256 * ((length - 1) // SEGMENT * SEGMENT) for length in lengths)
        bounded = ["--scorer", "gate", "--hidden-states", str(states), "--work", str(tmp_path / "bounded")]
        by_layers = servers.run([*command, *bounded, "--json"], timeout=400)
        assert by_layers.returncode == 0, by_layers.stderr[-3000:]
        assert "through the model 2 times, for 1 layers each" in by_layers.stderr
        assert json.loads(by_layers.stdout) == [reports["gate"]]

        # What is missing is recorded again, and comes out the same.
        (work / "sample-00001.safetensors").unlink()
        again = servers.run([*command, "--json"], timeout=400)
        assert again.returncode == 0, again.stderr[-3000:]
        assert json.loads(again.stdout) == list(reports.values())
    plain = servers.run([*command, "--error-samples", "0", "--quality-ratios", str(RATIO)], timeout=400)
    assert plain.returncode == 0, plain.stderr[-3000:]
    for scorer in reports:
        (measured,) = load_profile(tmp_path / f"{scorer}.safetensors").quality
        assert (measured.ratio, set(measured.kl_by_text)) == (RATIO, set(BUILT_IN))
        assert measured.kl > 0
    curves = error_curves(output_errors(model, samples, work, profile), SEGMENT)
    expected = weighed(load_profile(tmp_path / "keydiff.safetensors").coverage, curves)
    np.testing.assert_allclose(profile.coverage, expected, rtol=0.02, atol=1e-5)
    profile.save(tmp_path / "profile.safetensors")

    serving = ["--dtype", "float32", "--skip-tokenizer-init", "--kv-bytes", "64MiB", "--max-running-requests", "2"]
    serving += ["--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)]
    serving += ["--ragged-check", "off", "--ragged-profile", str(tmp_path / "profile.safetensors")]
    # What the oracle knows: what is kept stays as it is.
    with servers.serve(model, *serving, "--ragged-fit", "none", log=tmp_path / "server.log") as server:
        prompt = rng.integers(3, 512, 500).tolist()
        answer = generate(server, prompt, 30, logprobs_from=0)
        assert f"digest {profile.digest()}" in server.log_text()
    # A profile brings its scorer; what was found in the cache answers as what is computed anew.
    serving[-1] = str(tmp_path / "trained.safetensors")
    with servers.serve(model, *serving, log=tmp_path / "gate.log") as server:
        right = replace_quality(server, gate, tmp_path / "expected.safetensors", monkeypatch, capsys)
        assert "scorer gate" in server.log_text()
        assert f"fitted to {3 * PER_QUERY_HEAD} queries per head" in server.log_text()
        turn = prompt + generate(server, prompt, 20).tokens
        warm = generate(server, turn, 10)
        flush(server)
        cold = generate(server, turn, 10)
    assert warm.cached > cold.cached == 0
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.output_logprobs, cold.output_logprobs, atol=1e-4)
    kept = profile_kept(profile, RATIO, SEGMENT)
    want = Oracle(str(model), kept, SEGMENT, "keydiff").logprobs(prompt + answer.tokens)
    np.testing.assert_allclose(np.concatenate([answer.input_logprobs, answer.output_logprobs]), want, atol=1e-3)
    # Servers that are not as they were calibrated.
    other = tmp_path / "other.safetensors"
    make_profile(model, other, segment=SEGMENT, seed=7, codebook=True)
    for name, more in {
        "unfitted": (*serving, "--ragged-fit", "none"),
        "uniform": (*serving[:-1], "uniform"),
        "of another model": (*serving[:-1], str(other)),
    }.items():
        with servers.serve(model, *more, log=tmp_path / "wrong.log") as server:
            found = verified(server, tmp_path / "expected.safetensors", monkeypatch, capsys)
        assert found["mean"]["to_reference"]["kl"] > 1.5 * right["mean"]["to_reference"]["kl"], name
        (fault,) = found["faults"]
        assert fault.startswith("KL to the reference is "), name


def verified(server: Server, profile: Path, monkeypatch, capsys) -> dict:
    """Return what `sgl-ragged verify` finds with the reference of a profile; it must exit 1 if there are faults."""
    monkeypatch.setattr("sys.argv", ["sgl-ragged", "verify", "--url", server.url, "--profile", str(profile), "--json"])
    capsys.readouterr()
    try:
        cli.main()
    except SystemExit as end:
        status = end.code
    else:
        status = 0
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["faults"] else 0)
    return found


def replace_quality(server: Server, profile: Profile, path: Path, monkeypatch, capsys) -> dict:
    """Save the profile at `path` with one text and the KL that a server has for it, and return what `verify` finds."""
    profile = replace(profile, reference=profile.reference[:1], quality=())
    profile.save(path)
    (text,), kl = profile.reference, verified(server, path, monkeypatch, capsys)["mean"]["to_reference"]["kl"]
    row = MeasuredQuality(RATIO, "wide", RATIO, kl, 0.0, 0.5, {text.name: kl})
    replace(profile, quality=(row,)).save(path)
    found = verified(server, path, monkeypatch, capsys)
    assert (found["faults"], found["measured_kl"]) == ([], kl)
    return found


@torch.no_grad()
def check_reference(model: Path, profile: Profile) -> None:
    """The recorded reference equals the predictions of transformers' model."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert {text.name for text in profile.reference} == set(BUILT_IN)
    for text in profile.reference:
        assert (len(text.tokens), text.first) == (LONGEST - DECODED, SEGMENT + 1)
        logprobs = made(torch.from_numpy(text.tokens)[None]).logits[0, SEGMENT:-1].log_softmax(-1)
        top = logprobs.topk(LIKELIEST).values
        # In float16.
        np.testing.assert_allclose(text.likeliest_logprobs, top, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(logprobs.gather(1, torch.from_numpy(text.likeliest).long()), top, atol=1e-3)
        own = logprobs.gather(1, torch.from_numpy(text.tokens[SEGMENT + 1 :, None]).long())[:, 0]
        np.testing.assert_allclose(text.logprobs, own, atol=1e-3)


@torch.no_grad()
def output_errors(model: Path, samples: list[dict], work: Path, profile: Profile) -> np.ndarray:
    """[layers, heads, counts]: what `left_over` finds in transformers' model, of the choices that were recorded."""
    seen: list[tuple[torch.Tensor, ...]] = []

    def attend(module, queries, keys, values, mask, scaling, **_):
        seen.append((queries[0] * scaling, keys[0], values[0]))
        return sdpa_attention_forward(module, queries, keys, values, mask, scaling=scaling)

    ALL_ATTENTION_FUNCTIONS["seen"] = attend
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="seen")
    found = []
    for number, sample in enumerate(samples):
        seen.clear()
        ids = sample["input_ids"][:LONGEST]
        states = made(torch.tensor([ids]), output_hidden_states=True).hidden_states
        scores = load_file(work / f"sample-{number:05d}.safetensors")["keydiff.scores"]
        positions = query_positions(len(ids), SEGMENT)
        of_layers = []
        for layer, (queries, keys, values) in enumerate(seen):
            weight, stream = made.model.layers[layer].self_attn.o_proj.weight, states[layer][0, positions]

            def behind(outputs, weight=weight, stream=stream):
                return lambda change: change @ weight.T, (stream + outputs @ weight.T).square().sum(dim=1)

            book = {name: torch.from_numpy(profile.statistics[name][layer].copy()) for name in (*CODEBOOK, *ROPE)}
            ranked = rank_positions(scores[:, layer], torch.arange(len(scores)) == 0)
            own = queries.transpose(0, 1).unflatten(1, (len(keys), -1))[positions]
            references = References.from_statistics(book, keys.shape[-1] ** -0.5)
            of_layers.append(left_over(own, keys, values, positions, ranked, references, behind))
        found.append(torch.stack(of_layers))
    return torch.stack(found).mean(dim=0).numpy()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/no/such/model"), "cannot read the config"),
        (("--ratio", "0"), "outside (0, 1]"),
        (("--segment", "100"), "multiple of 16"),
        (("--samples", "1"), "at least 2"),
        (("--error-samples", "-1"), "--error-samples -1: at least 0"),
        (("--tau-sim", "1.5"), "--tau-sim 1.5 is outside [0, 1]"),
        (("--tp", "3"), "does not divide the model's 2 KV heads"),
        (("--scorer", "keydiff", "h2o"), "must contain {scorer}"),
        (("--scorer", "fastkvzip"), "pass --scorer-weights"),
        (("--scorer", "nonsense"), "unknown scorer"),
        (("--data", "/no/such/file"), "cannot read samples"),
        (("-o", "/no/such/folder/p.safetensors"), "does not exist"),
        (("-o", "/dev"), "-o /dev is a directory; name a file in it"),
    ],
)
def test_bad_input_ends_with_one_line(tmp_path, monkeypatch, capsys, flags, words):
    from transformers import LlamaConfig

    from calib.__main__ import main
    from tests.models import SIZES

    sizes = SIZES | dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    arguments = ["calib", "run", "--model", str(tmp_path), "-o", str(tmp_path / "p.safetensors"), *flags]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert words in str(ended.value.code)
    assert str(ended.value.code).startswith("calib: ")
    assert "\n" not in str(ended.value.code)
