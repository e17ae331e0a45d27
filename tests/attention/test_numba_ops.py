"""Decode that numba compiles, against a dense mask and against torch on the same slabs, at ragged edges."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numba
import pytest
import torch

from sgl_ragged.attention import numba_decode, numba_ops
from sgl_ragged.attention.numba_cache import compile_once
from sgl_ragged.attention.numba_ops import NumbaOps
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.slab_format import FORMATS
from sgl_ragged.mem_pool.slab_store import seal_in_torch
from sgl_ragged.profiles.profile_cache import VARIABLE
from tests.attention.test_torch_ops import BOUNDS
from tests.harness import KEPT, LARGEST, SCALES, SEGMENT, TORCH, Harness, Kernel, Sequence
from tests.mem_pool.test_quantise import compare
from tests.self_checked import checked
from tests.split_heads import PLACEMENTS, check_parts

NUMBA = Kernel(lambda store, _, in_view: NumbaOps(store, in_view), lambda _: seal_in_torch)
EDGES = [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 4 * SEGMENT + 7]
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)
# Every shape is compiled for seconds: most tests take the first two.
TRIED = (("wide", 2, 16), ("k6v5", 2, 16), ("k5v3", 3, 80))


def decoded(form: str, per_head: int, dim: int, steps: int, **more) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Decode steps of a batch with padding after a prefill at ragged edges: found and expected outputs."""
    sequences = [Sequence(n + steps, *KEPT.shape, per_head, dim, "keydiff", seed) for seed, n in enumerate(EDGES)]
    harness = Harness(KEPT, dim, "keydiff", len(EDGES), 8, per_head, kernel=NUMBA, form=FORMATS[form], **more)
    harness.extend(sequences, [0] * len(EDGES), EDGES)
    found = [harness.decode(sequences, [n + step for n in EDGES], padding=2) for step in range(steps)]
    stored = [one.stored(harness.store.dtype, SCALES) for one in sequences]
    every = [one.expected(KEPT, form=form, sinks=more.get("sinks")) for one in stored]
    return found, [torch.stack([e[n + step] for e, n in zip(every, EDGES, strict=True)]) for step in range(steps)]


def agree(found: list[torch.Tensor], want: list[torch.Tensor], form: str) -> None:
    if FORMATS[form].quantised:
        compare(found, want, FORMATS[form])
        return
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(want), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "per_head", "dim"),
    [*TRIED, *(thorough(one, 2, 16) for one in FORMATS), thorough("wide", 1, 7), thorough("k4v4", 8, 128)],
)
def test_decode_at_ragged_edges(form, per_head, dim):
    """Over a border, with learned sinks, which need log-sum-exps."""
    sinks = torch.randn(*KEPT.shape, per_head, generator=torch.Generator().manual_seed(5)) * 2
    agree(*decoded(form, per_head, dim, steps=SEGMENT + 2 if form == "wide" else 3, sinks=sinks), form)


@pytest.mark.parametrize("dtype", LARGEST)
def test_caches_in_fp8(dtype):
    agree(*decoded("wide", 2, 16, 3, dtype=dtype), "wide")


@pytest.mark.parametrize("form", ["wide", "k6v5"])
def test_pages_of_few_tokens(form):
    agree(*decoded(form, 2, 16, 3, page_tokens=5), form)


@pytest.mark.parametrize(
    ("form", "dtype", "per_head", "dim"),
    [
        ("k8v4", torch.bfloat16, 3, 64),
        ("wide", torch.float16, 3, 64),
        thorough("wide", torch.bfloat16, 3, 64),
        thorough("k3v6", torch.float16, 2, 96),
    ],
)
def test_outputs_and_log_sum_exps_are_those_of_torch(form, dtype, per_head, dim):
    """Both read the same slabs. A later prefill reads what each appended."""
    sequences = [Sequence(n + 3, *KEPT.shape, per_head, dim, "keydiff", seed) for seed, n in enumerate(EDGES)]
    more = dict(form=FORMATS[form], dtype=dtype, gives_lse=True)
    of_torch, of_numba = (
        Harness(KEPT, dim, "keydiff", len(EDGES), 8, per_head, kernel=one, **more) for one in (TORCH, NUMBA)
    )
    for step in range(3):
        outputs = []
        for harness in (of_torch, of_numba):
            if step == 0:
                harness.extend(sequences, [0] * len(EDGES), EDGES)
            outputs.append(harness.decode(sequences, [n + step for n in EDGES], padding=1))
        torch.testing.assert_close(*outputs, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        torch.testing.assert_close(of_numba.lse, of_torch.lse, atol=1e-4, rtol=1e-5)
    sequences = [Sequence(n + 9, *KEPT.shape, per_head, dim, "keydiff", seed) for seed, n in enumerate(EDGES)]
    chunks = [n + 3 for n in EDGES], [n + 9 for n in EDGES]
    found, want = (harness.extend(sequences, *chunks) for harness in (of_numba, of_torch))
    torch.testing.assert_close(torch.cat(found), torch.cat(want), atol=0, rtol=0)


@pytest.mark.parametrize("form", ["wide", "k6v5"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_parts_of_heads_add_up_to_the_whole(case, form):
    check_parts(case, "keydiff", steps=5, kernel=NUMBA, form=FORMATS[form])


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_views_may_leave_segments_out(bound):
    length = 6 * SEGMENT + 7
    sequence = Sequence(length + 2, *KEPT.shape, 2, 16, "keydiff", seed=0)
    harness = Harness(KEPT, 16, "keydiff", 1, 8, kernel=NUMBA, bound=bound)
    expected = sequence.expected(KEPT, sequence.seen(bound))
    for begin in range(0, length, SEGMENT):
        harness.extend([sequence], [begin], [min(begin + SEGMENT, length)])
    for step in range(2):
        output = harness.decode([sequence], [length + step])
        torch.testing.assert_close(output.double(), expected[None, length + step], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["wide", "k6v5"])
def test_nan_stays_with_its_request(form):
    """The answers of other requests stay as they are."""
    sequences = [Sequence(n + 1, *KEPT.shape, 2, 16, "keydiff", seed) for seed, n in enumerate(EDGES)]
    for tensor in (sequences[-1].k, sequences[-1].v):
        tensor[70:80] = torch.nan
    harness = Harness(KEPT[2:], 16, "keydiff", len(EDGES), 8, kernel=NUMBA, form=FORMATS[form])
    for one in sequences:
        one.q, one.k, one.v, one.gates = (x[:, 2:] for x in (one.q, one.k, one.v, one.gates))
    harness.extend(sequences, [0] * len(EDGES), EDGES)
    output = harness.decode(sequences, EDGES)
    assert output[-1].isnan().all()
    assert output[:-1].isfinite().all()


def test_threads_share_the_work(monkeypatch):
    """Each computes a range of pairs of requests and heads; all of them once."""
    ranges = []

    class Recorded(NumbaOps):
        def __init__(self, *args):
            super().__init__(*args)
            kernel = self._kernel
            self._kernel = lambda first, end, *more: ranges.append((first, end)) or kernel(first, end, *more)

    monkeypatch.setattr(numba_ops.torch, "get_num_threads", lambda: 3)
    monkeypatch.setitem(globals(), "NUMBA", Kernel(lambda store, _, in_view: Recorded(store, in_view), TORCH.sealer))
    agree(*decoded("wide", 2, 16, 1), "wide")
    pairs = (len(EDGES) + 2) * KEPT.shape[1]
    for layer in range(len(KEPT)):
        own = sorted(ranges[3 * layer : 3 * layer + 3])
        assert [one[0] for one in own] == [0, *(one[1] for one in own[:-1])]
        assert own[-1][1] == pairs
        # Short requests come first.
        assert own[0][1] > pairs // 3


def test_servers_pass_the_check_at_their_start():
    found = checked("numba", "wide", "snapkv")
    assert 0 < max(found.differences.values()) <= found.tolerance


def test_a_fault_ends_the_start_with_one_line(monkeypatch):
    """With `auto`, too: nothing else takes its place."""
    monkeypatch.setattr(numba_ops.math, "log2", lambda _: 1.0)
    line = r"--ragged-kernel numba on this CPU: decode.* differs from dense attention by .*; use --ragged-kernel torch$"
    with pytest.raises(RaggedConfigError, match=line):
        checked("numba")


class Compiled:
    """A small function, as `compiled_decode` has numba compile it."""

    def __init__(self, constant: int) -> None:
        def added(x):
            return x + constant

        self.function = compile_once(added, numba.int64(numba.int64), {}, constant, [Path(__file__)])


def test_compiled_code_is_kept_by_its_constants(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    before = numba.config.CACHE_DIR
    for hits in (0, 1):
        for constant in (1, 2):
            found = Compiled(constant).function
            assert found(3) == 3 + constant
            assert sum(found.stats.cache_hits.values()) == hits
    assert len(list((tmp_path / "numba").iterdir())) == 2
    assert before == numba.config.CACHE_DIR


def test_without_a_writable_folder_code_is_compiled_for_the_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    assert Compiled(4).function(3) == 7
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = Compiled(4).function
    assert found(3) == 7
    assert found.stats.cache_path is None


def test_files_that_are_compiled_in_decide_what_is_taken_from_disk():
    assert {path.name for path in numba_decode.SOURCES} == {"numba_decode.py", "numba_rows.py"}
    assert all(path.is_file() for path in numba_decode.SOURCES)
