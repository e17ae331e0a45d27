"""What the recorder writes, against a dense computation, and what is derived from it."""

from __future__ import annotations

import functools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.recall import MODEL
from benchmarks.recall.task import VOCABULARY
from calib.attended import (
    ANSWERING,
    ATTENDED_WINDOW,
    MAX_WINDOWS,
    STARTS,
    TOKENS,
    TOP,
    WEIGHTS,
    choose_windows,
)
from calib.coverage import coverage_curves, derive_profile
from calib.engine import join_ranks
from calib.measure import make_engine, measure, value_mean
from calib.query_moments import before_rope, rope_of
from calib.recorder import ANSWERS, WINDOWS, Recorder, hidden_states_recording, recording_file
from calib.recording import HIDDEN_STATES, VALUES
from calib.recordings_folder import Settings, claim
from calib.samples import Sample, TokenizedSample, dataset_hash, read_samples, tokenize
from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.attention.view import extend_view
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.kv_dtype import KvScales
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.profiles.budgets import coverage_kept
from sgl_ragged.scorers import get_scorer
from tests.oracle import Tokens, kept_tokens

SEGMENT, LAYERS, HEADS, PER_HEAD, DIM = 64, 2, 3, 2, 8
LENGTH = 4 * SEGMENT + 5
SCORERS = ("keydiff", "snapkv", "h2o", "expected_attention")


def content(seed: int) -> list[torch.Tensor]:
    """Queries [T, layers, heads, q_per_kv, d], keys and values [T, layers, heads, d]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((LENGTH, LAYERS, HEADS, PER_HEAD, DIM), (LENGTH, LAYERS, HEADS, DIM), (LENGTH, LAYERS, HEADS, DIM))
    return [2 * torch.randn(shape, generator=generator) for shape in shapes]


def record(
    recorder: Recorder,
    tensors: list[torch.Tensor],
    chunks: list[int],
    hidden: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Feed a sequence to a store at rho = 1 in chunks, as the backend does; `hidden` is [layers, tokens, size].

    dtype: of the cache; one of FP8 has scales of 1/4.
    """
    layout = SlabLayout(np.full((LAYERS, HEADS), SEGMENT), DIM, SEGMENT)
    scorer = get_scorer("streaming")
    sizes = dict(q_per_kv=PER_HEAD, query_dtype=torch.float32, kv_scales=[KvScales(0.25, 0.25)] * LAYERS)
    store = SlabStore(layout, scorer, 8, 2, dtype, "cpu", **sizes)
    operations = TorchOps(store)
    table = torch.zeros(2, 8 * SEGMENT, dtype=torch.int32)
    slots = torch.tensor([5, 2, 7, 1, 3, 4, 6])
    table[1, : 7 * SEGMENT] = (slots[:, None] * SEGMENT + torch.arange(SEGMENT)).flatten()
    start = 0
    for end in [*chunks, LENGTH]:
        batch = extend_view(table, torch.tensor([1]), [start], [end - start], SEGMENT)
        for layer in range(LAYERS):
            part = [tensor[start:end, layer] for tensor in tensors]
            operations.extend(layer, *part, operations.extend_batch(batch))
            entered = None if hidden is None else hidden[layer, start:end]
            recorder.extend(store, layer, *part, batch, None, entered)
        start = end
    return load_file(recording_file(recorder.folder, 0))


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    path = tmp_path_factory.mktemp("statistics") / "s.safetensors"
    mean = torch.randn(LAYERS, HEADS, PER_HEAD, DIM, generator=torch.Generator().manual_seed(1))
    covariance = torch.eye(DIM).expand(LAYERS, HEADS, PER_HEAD, DIM, DIM) / 4
    rope = {
        "rope_frequencies": torch.ones(LAYERS, 1, DIM // 2) / 7,
        "rope_order": torch.arange(DIM).expand(LAYERS, 1, -1),
    }
    moments = {"query_mean": mean, "query_covariance": covariance}
    save_file({name: tensor.contiguous() for name, tensor in (moments | rope).items()}, str(path))
    return path


def test_a_checkpoint_with_an_fp8_cache_is_recorded_alike(tmp_path, statistics):
    """Of keys and values that FP8 holds exactly: those of earlier chunks are read back with their scales."""
    queries, *stored = content(seed=1)
    stored = [x.mul(4).to(torch.float8_e4m3fn).float() / 4 for x in stored]
    found = []
    for dtype in (torch.float32, torch.float8_e4m3fn):
        recorder = Recorder(str(tmp_path), SCORERS, str(statistics))
        found.append(record(recorder, [queries, *stored], [2 * SEGMENT, 3 * SEGMENT], dtype=dtype))
    for name, wide in found[0].items():
        assert torch.equal(wide, found[1][name]), name


@pytest.mark.parametrize("chunks", [[], [SEGMENT], [2 * SEGMENT, 3 * SEGMENT]])
def test_coverage_is_the_peak_attention_of_later_segments(tmp_path, statistics, chunks):
    tensors = content(seed=0)
    (tmp_path / ANSWERS).write_text("[[70, 75], [150, 151]]")
    answering = [69, 70, 71, 72, 73, 149]
    found = record(Recorder(str(tmp_path), SCORERS, str(statistics)), tensors, chunks)
    assert int(found["tokens"]) == LENGTH
    torch.testing.assert_close(found[VALUES], tensors[2].double().sum(dim=0).float())
    mean = value_mean([found, {VALUES: 2 * found[VALUES], "tokens": torch.tensor(3 * LENGTH)}])
    torch.testing.assert_close(mean, tensors[2].double().mean(dim=0).float() * 3 / 4)
    curves = {
        (scorer, kind): coverage_curves(found[f"{scorer}.scores"], found[f"peaks.{kind}"])
        for scorer in SCORERS
        for kind in ("all", "answers")
    }
    given_statistics = load_file(statistics)
    for layer, head in np.ndindex(LAYERS, HEADS):
        queries, keys, values = (x[:, layer, head].double().numpy() for x in tensors)
        queries = queries.swapaxes(0, 1)
        logits = queries @ keys.T * DIM**-0.5
        logits[:, np.triu(np.ones((LENGTH, LENGTH), dtype=bool), 1)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).max(axis=0)
        own = [given_statistics[name][layer] for name in get_scorer("expected_attention").statistics]
        head_statistics = tuple(t[head if len(t) > 1 else 0].double().numpy() for t in own)
        tokens = Tokens(keys, values, queries, DIM**-0.5, statistics=head_statistics)
        for segment in range(LENGTH // SEGMENT):
            start, stop = segment * SEGMENT, (segment + 1) * SEGMENT
            later = {"all": list(range(stop, LENGTH)), "answers": [place for place in answering if place >= stop]}
            for kind, rows in later.items():
                peak = weights[rows, start:stop].max(axis=0, initial=0.0)
                for scorer in SCORERS:
                    for units in (1, 2, 3):
                        kept = kept_tokens(scorer, tokens.part(start, stop), 16 * units, segment == 0)
                        covered = curves[scorer, kind][segment, layer, head, units - 1]
                        assert float(covered) == pytest.approx(peak[kept].sum(), rel=1e-4)


@pytest.mark.parametrize("chunks", [[], [SEGMENT], [2 * SEGMENT, 3 * SEGMENT]])
def test_windows_hold_what_is_attended_to_most(tmp_path, chunks):
    """Of the segments before the queries' own, by any of their heads; the first has fewer tokens than there is room."""
    queries, keys, values = content(seed=5)
    windows = choose_windows(LENGTH, SEGMENT)
    assert windows == list(range(SEGMENT, 4 * SEGMENT, ATTENDED_WINDOW))
    (tmp_path / WINDOWS).write_text(json.dumps(windows))
    found = record(Recorder(str(tmp_path), ()), [queries, keys, values], chunks)
    assert found[STARTS].tolist() == windows
    assert not found[ANSWERING].any()
    assert found[TOKENS].dtype == torch.int32
    assert found[WEIGHTS].dtype == torch.float16
    assert found[TOKENS].shape == found[WEIGHTS].shape == (LAYERS, HEADS, len(windows), TOP)
    for layer, head in np.ndindex(LAYERS, HEADS):
        own_queries, own_keys = queries[:, layer, head].double().numpy(), keys[:, layer, head].double().numpy()
        for place, first in enumerate(windows):
            past = first // SEGMENT * SEGMENT
            dense = np.zeros(past)
            for position in range(first, first + ATTENDED_WINDOW):
                for query in own_queries[position]:
                    powers = np.exp(own_keys[: position + 1] @ query * DIM**-0.5)
                    dense = np.maximum(dense, (powers / powers.sum())[:past])
            tokens, weights = (found[name][layer, head, place].numpy() for name in (TOKENS, WEIGHTS))
            size = min(past, TOP)
            assert (tokens[size:] == -1).all()
            assert (weights[size:] == 0).all()
            assert len(set(tokens[:size])) == size
            np.testing.assert_allclose(weights[:size], np.sort(dense)[::-1][:size], rtol=2e-3, atol=1e-7)
            np.testing.assert_allclose(weights[:size], dense[tokens[:size]], rtol=2e-3, atol=1e-7)


def test_at_most_so_many_windows_in_pairs_over_the_whole_sequence():
    assert choose_windows(SEGMENT + 1, SEGMENT) == []
    assert choose_windows(SEGMENT + 25, SEGMENT) == [SEGMENT, SEGMENT + 8, SEGMENT + 16]
    full = choose_windows(SEGMENT + MAX_WINDOWS * ATTENDED_WINDOW, SEGMENT)
    assert len(full) == MAX_WINDOWS
    for more in (1, 2, 3, 500):
        length = SEGMENT + (MAX_WINDOWS + more) * ATTENDED_WINDOW + 7
        chosen = choose_windows(length, SEGMENT)
        assert len(set(chosen)) == MAX_WINDOWS
        assert chosen == sorted(chosen)
        assert (chosen[0], chosen[-1]) == (SEGMENT, length - 7 - ATTENDED_WINDOW)
        assert set(np.diff(chosen)[::2]) == {ATTENDED_WINDOW}


def test_windows_that_answer_are_among_them(tmp_path):
    """And those before them. An answer's first token is predicted by the query before it."""
    length, border = SEGMENT + 500 * ATTENDED_WINDOW, SEGMENT + 202 * ATTENDED_WINDOW
    answers = [(border, border + 1), (border + ATTENDED_WINDOW + 1, border + 3 * ATTENDED_WINDOW + 1)]
    chosen = choose_windows(length, SEGMENT, answers)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= MAX_WINDOWS
    assert {border + n * ATTENDED_WINDOW for n in (-2, -1, 0, 1, 2)} <= set(chosen)
    assert (chosen[0], chosen[-1]) == (SEGMENT, length - ATTENDED_WINDOW)
    # Of too many, some from all over the sequence; those in the first segment look at nothing.
    chosen = choose_windows(length, SEGMENT, [(1, length)])
    assert MAX_WINDOWS // 2 <= len(chosen) <= MAX_WINDOWS
    assert (chosen[0], chosen[-1]) == (SEGMENT, length - ATTENDED_WINDOW)

    windows = choose_windows(LENGTH, SEGMENT)
    (tmp_path / WINDOWS).write_text(json.dumps(windows))
    (tmp_path / ANSWERS).write_text(json.dumps([[windows[2], windows[2] + 1], [windows[3] + 1, windows[3] + 3]]))
    found = record(Recorder(str(tmp_path), ()), content(seed=5), [])
    assert found[ANSWERING].nonzero().flatten().tolist() == [1, 3]


def test_moments_of_the_queries(tmp_path):
    queries, *rest = content(seed=2)
    recorder = Recorder(str(tmp_path), (), moments=True)
    model, angles = torch.nn.Module(), torch.arange(1.0, DIM // 2 + 1) / 9
    model.cos_sin_cache = torch.cat([angles.cos(), angles.sin()]).expand(2, DIM)
    model.rotary_dim, model.is_neox_style = DIM, True
    recorder.prepare(model, SimpleNamespace(layout=SimpleNamespace(head_dim=DIM)))
    found = record(recorder, [queries, *rest], [SEGMENT])
    rope = rope_of(model, DIM)
    flat = before_rope(queries[:, 1, 2, :1], 0, rope)[:, 0]
    assert int(found["count"]) == LENGTH
    torch.testing.assert_close(found["query_mean"][1, 2, 0], flat.sum(0))
    torch.testing.assert_close(found["query_covariance"][1, 2, 0], flat.T @ flat)
    torch.testing.assert_close(found["rope_frequencies"], angles.expand(LAYERS, 1, -1))


def test_hidden_states_of_segments_that_somebody_looks_back_at(tmp_path):
    hidden = torch.randn(LAYERS, LENGTH, 5)
    recorder = Recorder(str(tmp_path), (), reads_hidden_states=True)
    found = record(recorder, content(seed=2), [SEGMENT, 2 * SEGMENT], hidden)
    kept = (LENGTH - 1) // SEGMENT * SEGMENT
    assert torch.equal(load_file(hidden_states_recording(tmp_path))[HIDDEN_STATES], hidden[:, :kept].half())
    assert found["peaks.all"].shape == (LAYERS, HEADS, kept)
    # They are the same on all ranks: the first one keeps them.
    assert not recorder.for_rank(1).keeps_hidden_states
    joined = join_ranks([found, found])
    assert joined["peaks.all"].shape == (LAYERS, 2 * HEADS, kept)


def test_a_new_request_starts_afresh(tmp_path):
    """Also in a worker process, to which the recorder is pickled."""
    recorder = pickle.loads(pickle.dumps(Recorder(str(tmp_path), ("keydiff",))))
    first = record(recorder, content(seed=3), [])
    record(recorder, content(seed=4), [SEGMENT])
    again = record(recorder, content(seed=3), [])
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])


def make_settings(**changes) -> Settings:
    values = dict(model="some/model", model_fingerprint="0" * 16, scorers=("keydiff",), segment=32)
    values |= dict(dataset_hash="d", dtype="auto", scorer_weights=None)
    return Settings(**(values | changes))


def derive(recordings, **changes):
    options = dict(ratio=0.5, scope="model", queries="all", head_dim=DIM, statistics={})
    tasks = ["a", "b"] * len(recordings)
    return derive_profile(recordings, tasks[: len(recordings)], make_settings(), "keydiff", **(options | changes))


def test_coverage_profile_serves_the_mean_curve():
    """Two layers of two heads; peaks on the guard and before it, so that curves have two known points."""

    def sample(*curves: tuple[float, float]) -> dict[str, torch.Tensor]:
        peaks = torch.zeros(2, 2, 32)
        for head, (guard, everything) in enumerate(curves):
            peaks[head // 2, head % 2, 20], peaks[head // 2, head % 2, 5] = guard, everything - guard
        return {"keydiff.scores": torch.zeros(1, 2, 2, 32), "peaks.all": peaks}

    recordings = [sample((9, 10), (1, 1.5), (1, 1.5), (0, 8)), sample((9, 10), (1, 1.5), (0, 6), (1, 1.5))]
    profile = derive(recordings, ratio=0.75)
    np.testing.assert_allclose(profile.coverage[1, 1], [0.5, 4.75])
    # 0.75 of 8 units: one each, then the second unit of the two heads that gain most by it.
    kept = coverage_kept(profile.coverage, 0.75, 32)
    assert kept.tolist() == [[16, 16], [32, 32]]
    assert profile.shares.shape == (2, 2, 2)
    np.testing.assert_allclose(profile.mu, profile.shares.mean(axis=0))
    np.testing.assert_allclose(profile.sigma, profile.shares.std(axis=0), atol=1e-7)
    # Each sample's own curves: its six units are those of the heads that gain most by a second one.
    assert profile.shares.tolist() == [[[1, 0.5], [0.5, 1]], [[1, 0.5], [1, 0.5]]]
    assert (profile.tasks, profile.model_id, profile.ratio) == (("a", "b"), "model", 0.75)


def test_ranks_are_joined_head_by_head():
    scores, peaks, attended = torch.randn(3, 2, 4, 32), torch.rand(2, 4, 96), torch.randint(96, (2, 4, 2, TOP))
    halves = [
        {
            "tokens": torch.tensor(100),
            "x.scores": scores[:, :, part],
            "peaks.all": peaks[:, part],
            STARTS: torch.tensor([32, 40]),
            TOKENS: attended[:, part],
        }
        for part in (slice(0, 2), slice(2, 4))
    ]
    joined = join_ranks(halves)
    assert torch.equal(joined["x.scores"], scores)
    assert torch.equal(joined["peaks.all"], peaks)
    assert int(joined["tokens"]) == 100
    assert joined[STARTS].tolist() == [32, 40]
    assert torch.equal(joined[TOKENS], attended)


# Data


def test_samples_of_every_kind(tmp_path):
    file = tmp_path / "s.jsonl"
    lines = [{"input_ids": [1, 2, 3], "task": "t"}, {"text": "abc"}, {"messages": [{"role": "user", "content": "x"}]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    samples = read_samples([file], 10, 0)
    assert [sample.task for sample in samples] == ["t", "samples", "samples"]
    assert samples[0].input_ids == (1, 2, 3)
    text = tmp_path / "book.txt"
    text.write_text("once")
    assert read_samples([text, file], 2, 0)[0].task == tmp_path.name
    assert len(read_samples([file], 2, 0)) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "exactly one of"),
        ('{"task": "x"}', "exactly one of"),
        ('{"text": "x", "input_ids": [1]}', "exactly one of"),
        ('{"input_ids": ["a"]}', "input_ids is malformed"),
        ('{"input_ids": [1, 2], "answers": [1]}', "list of .start, stop"),
        ('{"input_ids": [1, 2], "answers": [[1, 3]]}', "inside input_ids"),
        ('{"input_ids": [1, 2], "answers": [[0, 1]]}', "inside input_ids"),
        ('{"messages": ["a"]}', "messages is malformed"),
    ],
)
def test_malformed_samples_name_the_line(tmp_path, line, words):
    file = tmp_path / "s.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(RaggedConfigError, match=words) as error:
        read_samples([file], 10, 0)
    assert f"{file}:2" in str(error.value)


def test_short_samples_are_refused(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text('{"input_ids": [1, 2, 3]}')
    with pytest.raises(RaggedConfigError, match=f"needs at least {SEGMENT + 1}"):
        tokenize(read_samples([file], 1, 0), None, 100, SEGMENT + 1)


def test_the_answers_of_a_chat_are_what_the_assistant_says():
    """Through the recall model's chat template: the answer and the end of the turn, for each turn."""
    turns = [("w1 w2 . recall k5", "v9"), ("w3 recall k7", "v1 v2")]
    messages = [{"role": r, "content": c} for u, a in turns for r, c in (("user", u), ("assistant", a))]
    tokenizer_of = functools.partial(AutoTokenizer.from_pretrained, MODEL)
    (sample,) = tokenize([Sample("t", messages=tuple(messages))], tokenizer_of, 100, 1)
    said = [[VOCABULARY[i] for i in sample.input_ids[start:stop]] for start, stop in sample.answers]
    assert said == [["v9", "<eos>"], ["v1", "v2", "<eos>"]]
    (cut,) = tokenize([Sample("t", messages=tuple(messages))], tokenizer_of, sample.answers[1][0] + 1, 1)
    assert cut.answers == (sample.answers[0], (sample.answers[1][0], sample.answers[1][0] + 1))


# Resuming


def test_what_is_recorded_is_not_recorded_again(tmp_path, monkeypatch):
    """An interrupted calibration goes on with the samples that are missing; other settings are refused."""
    samples = [TokenizedSample("t", tuple(range(n, n + 40))) for n in range(3)]
    seen: list[int] = []

    def make(settings):
        claim(tmp_path, settings)
        engine = make_engine(settings, tmp_path, 1)
        engine.record = one
        return engine

    def one(sample, layers, codebook):
        if len(seen) == 2:
            seen.append(-1)
            raise KeyboardInterrupt
        seen.append(sample.input_ids[0])
        return {"x": torch.tensor(sample.input_ids[0])}

    progress = SimpleNamespace(done=0)

    def advance() -> None:
        progress.done += 1

    chosen = make_settings(dataset_hash=dataset_hash(samples))
    with pytest.raises(KeyboardInterrupt):
        measure(make(chosen), samples, range(0), advance)
    found = measure(make(chosen), samples, range(0), advance)
    assert [int(r["x"]) for r in found] == [0, 1, 2]
    assert seen == [0, 1, -1, 2]
    with pytest.raises(RaggedConfigError, match="other settings or data"):
        make(make_settings(segment=64, dataset_hash=chosen.dataset_hash))
