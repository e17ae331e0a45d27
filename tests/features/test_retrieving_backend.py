"""The backend of servers that retrieve, with batches of which SGLang says less: replays of graphs, and made-up ones.

SGLang does neither on a CPU, so its own functions are called here on CPU tensors.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import base_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.retrieval.retriever import Retriever
from sgl_ragged.features.retrieval.roles import HeadRoles
from sgl_ragged.features.retrieval.serve import name_requests
from sgl_ragged.features.retrieval.settings import Retrieval
from sgl_ragged.features.retrieval.watching import Watching
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.backend import RaggedAttnBackend
from sgl_ragged.serve.pool import RaggedTokenToKVPool

SEGMENT, SEGMENTS, DIM, LAYERS, HEADS, PER_HEAD = 64, 5, 8, 2, 2, 2
KEPT = np.array([[64, 16], [16, 16]])
ROLES = HeadRoles(pivots=((0, 0),), watched_by=np.array([[-1, 0], [0, 0]]))
SETTINGS = Retrieval(reservoir_bytes=1 << 20, overlay=8, pivots=1, interval=4, drift=1.0)
ROWS = (3, 1)
"""Of the request table, in the order of the batch."""
GRAPH = 4
"""Requests in a captured graph."""


class Served:
    """Pool, backend and attention layers of a server, and two requests with random queries, keys and values."""

    def __init__(self, history: bool = False) -> None:
        rows = max(ROWS) + 1
        beside = torch.arange(rows * SEGMENTS, rows * (SEGMENTS + 2 * 3))
        sizes = PoolSizes(
            SlabLayout(KEPT, DIM, SEGMENT), 4, OpenPages(SEGMENT, 28), rows * SEGMENTS + len(beside), rows
        )
        store = SlabStore(
            sizes.layout, get_scorer("keydiff"), sizes.num_slots, rows, torch.float32, "cpu", q_per_kv=PER_HEAD,
            pages=sizes.open_pages,
        )  # fmt: skip
        self.pool = RaggedTokenToKVPool(sizes, store, device="cpu", layer_numbers=range(LAYERS))
        self.pool.store.tails.table[:] = beside.view(rows, 2, 3)
        pages = torch.arange(rows * SEGMENTS).view(rows, SEGMENTS, 1) * SEGMENT
        self.table = (pages + torch.arange(SEGMENT)).flatten(1).int()
        if history:
            self.pool.attached["history"] = self.pool.views = Histories(HistoryBound(2, "recency"), self.table, SEGMENT)
        else:
            retriever = Retriever(self.pool.store, SETTINGS, ROLES, 8, self.table)
            self.pool.attached["retrieval"] = retriever
            self.pool.epilogues.append(Watching(retriever))
        self.layers = torch.nn.ModuleList(
            RadixAttention(HEADS * PER_HEAD, DIM, DIM**-0.5, HEADS, layer_id=number) for number in range(LAYERS)
        )
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            model=self.layers,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )
        self.backend = RaggedAttnBackend(self.runner, lambda store, _, in_view: TorchOps(store, in_view))

    def attend(self, batch, tokens: int, seed: int) -> torch.Tensor:
        """The layers of one forward pass: [layers, tokens, ..]."""
        call = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        rng, found = torch.Generator().manual_seed(seed), []
        for layer in self.layers:
            q = torch.randn(tokens, HEADS * PER_HEAD * DIM, generator=rng)
            k, v = torch.randn(2, tokens, HEADS, DIM, generator=rng)
            found.append(call(q, k, v, layer, batch))
        return torch.stack(found)

    def run(self, work) -> torch.Tensor:
        """As SGLang's worker is called with a batch of both requests."""
        worker, batch = SimpleNamespace(model_runner=self.runner), SimpleNamespace(req_pool_indices_cpu=ROWS_ON_HOST)
        return name_requests(lambda *_: work(), worker, batch)

    def prefill(self, lengths: list[int]) -> torch.Tensor:
        for row, length in zip(ROWS, lengths, strict=True):
            self.pool.attached["retrieval"].begin(row, length)
        batch = forward_batch(
            ForwardMode.EXTEND, lengths, req_pool_indices_cpu=ROWS_ON_HOST, extend_prefix_lens_cpu=[0, 0],
            extend_seq_lens_cpu=lengths,
        )  # fmt: skip

        def work() -> torch.Tensor:
            self.backend.init_forward_metadata(batch)
            return self.attend(batch, sum(lengths), 0)

        return self.run(work)

    def decode(self, lengths: list[int], replayed: bool) -> torch.Tensor:
        """A step of both requests, by itself or as a graph of `GRAPH` requests is replayed for it."""
        batch = forward_batch(ForwardMode.DECODE, lengths)

        def work() -> torch.Tensor:
            if replayed:
                given = replay_view(batch)
                self.backend.init_forward_metadata_out_graph(given)
            else:
                given = batch
                self.backend.init_forward_metadata(given)
            # Padding comes last, so it changes nothing about what is drawn for the others.
            return self.attend(given, len(ROWS), sum(lengths)) if not replayed else self.padded(given, sum(lengths))

        return self.run(work)

    def padded(self, view, seed: int) -> torch.Tensor:
        rng, found = torch.Generator().manual_seed(seed), []
        for layer in self.layers:
            q = torch.randn(len(ROWS), HEADS * PER_HEAD * DIM, generator=rng)
            k, v = torch.randn(2, len(ROWS), HEADS, DIM, generator=rng)
            q, k, v = (torch.cat([one, one.new_ones(GRAPH - len(ROWS), *one.shape[1:])]) for one in (q, k, v))
            found.append(self.backend.forward_decode(q, k, v, layer, view)[: len(ROWS)])
        return torch.stack(found)


ROWS_ON_HOST = torch.tensor(ROWS)


def forward_batch(mode: ForwardMode, lengths: list[int], **more) -> ForwardBatch:
    """SGLang's, as its worker makes it."""
    return ForwardBatch(
        forward_mode=mode, batch_size=len(lengths), input_ids=torch.zeros(len(lengths), dtype=torch.int64),
        req_pool_indices=torch.tensor(ROWS), seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths),
        out_cache_loc=torch.zeros(len(lengths), dtype=torch.int64), seq_lens_sum=sum(lengths), rids=["a", "b"], **more,
    )  # fmt: skip


def buffers() -> SimpleNamespace:
    """Of a captured graph, before anything was written to them: rows 0, one token each."""
    zeros, ones = torch.zeros(GRAPH, dtype=torch.int64), torch.ones(GRAPH, dtype=torch.int64)
    return SimpleNamespace(
        input_ids=zeros, positions=zeros, req_pool_indices=zeros.clone(), seq_lens=ones.clone(), seq_lens_cpu=ones,
        out_cache_loc=zeros, mrope_positions=torch.zeros(3, GRAPH), num_token_non_padded=None,
        next_token_logits_buffer=None, encoder_lens=None, mamba_track_indices=None, custom_mask=None,
        global_num_tokens_gpu=zeros[:1], global_num_tokens_for_logprob_gpu=zeros[:1], ngram_embedding_info=None,
    )  # fmt: skip


def replay_view(batch: ForwardBatch):
    """What the attention backend is given before a graph is replayed for a batch."""
    given, size = buffers(), len(ROWS)
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
        getattr(given, name)[:size] = getattr(batch, name)
    return build_replay_fb_view(
        forward_batch=batch, buffers=given, bs=GRAPH, raw_bs=size, num_tokens=GRAPH, global_num_tokens_cpu=None,
        seq_len_fill_value=1, capture_forward_mode=ForwardMode.DECODE, is_encoder_decoder=False,
    )  # fmt: skip


def test_a_replayed_graph_retrieves_the_same():
    """Both requests go through the end of a segment, and each step that is due asks and fetches."""
    plain, graphs = Served(), Served()
    lengths = [3 * SEGMENT + 40, 2 * SEGMENT + 50]
    torch.testing.assert_close(graphs.prefill(lengths), plain.prefill(lengths))
    for step in range(1, 31):
        own = [length + step for length in lengths]
        expected = plain.decode(own, replayed=False)
        torch.testing.assert_close(graphs.decode(own, replayed=True), expected)
    assert plain.pool.attached["retrieval"].counts.fetched > 6
    assert vars(graphs.pool.attached["retrieval"].counts) == vars(plain.pool.attached["retrieval"].counts)
    for row in ROWS:
        assert graphs.pool.attached["retrieval"].overlaid_from(row) == plain.pool.attached["retrieval"].overlaid_from(
            row
        )
        assert graphs.pool.attached["retrieval"].overlays.counts[row].any()


def made_up(served: Served, mode: ForwardMode, monkeypatch) -> int:
    """Run SGLang's made-up batch of a mode; how many tokens went through the layers."""
    nothing = SimpleNamespace(
        pp_size=1, tp_group=SimpleNamespace(barrier=lambda: None), disaggregation_mode="null", num_dp_ranks=1,
        capture=SimpleNamespace(enable_torch_compile=False),
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
    )  # fmt: skip
    for name in ("get_parallel", "get_disagg", "get_flags", "get_exec"):
        monkeypatch.setattr(base_runner, name, lambda: nothing)
    for name in ("require_mlp_tp_gather", "require_attn_tp_gather", "require_gathered_buffer"):
        monkeypatch.setattr(base_runner, name, lambda: False)
    monkeypatch.setattr(base_runner, "get_server_return_hidden_states_mode", lambda: None)
    monkeypatch.setattr(base_runner, "enable_num_token_non_padded", lambda: False)
    monkeypatch.setattr(base_runner, "set_dp_buffer_len", lambda *_: None)
    monkeypatch.setattr(base_runner, "set_is_extend_in_batch", lambda *_: None)
    seen = []

    def forward(input_ids, positions, batch):
        seen.append(served.attend(batch, len(input_ids), 0).shape[1])

    runner = SimpleNamespace(
        **vars(served.runner) | {"model": SimpleNamespace(forward=forward)}, attn_backend=served.backend, device="cpu",
        is_generation=True, is_draft_worker=False, lora_manager=None, prepare_dummy_forward_batch=lambda batch: batch,
        spec_algorithm=SimpleNamespace(is_speculative=lambda: False, is_eagle=lambda: False, is_none=lambda: True),
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda _: None),
    )  # fmt: skip
    monkeypatch.setattr(base_runner, "create_dummy_verify_input", lambda *_: None)
    base_runner.BaseRunner._dummy_run(
        SimpleNamespace(model_runner=runner), GRAPH, forward_mode_override=mode, buffers=buffers()
    )
    return sum(seen)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("history", [False, True])
def test_batches_that_sglang_makes_up(history, mode, monkeypatch):
    served = Served(history)
    assert made_up(served, mode, monkeypatch) == GRAPH
    if not history:
        assert vars(served.pool.attached["retrieval"].counts) == {"asked": 0, "fetched": 0, "rows": 0}
        assert served.pool.attached["retrieval"].overlaid_from(0) is None
