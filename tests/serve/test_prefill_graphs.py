"""Graphs of prefill that break at attention: SGLang's own wrapper, with a capture that records no graph.

What a graph would do between the breaks, here the gates' work, is done again by hand, in the memory of the capture.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.backend import RaggedAttnBackend, attention_layers
from sgl_ragged.serve.pool import RaggedTokenToKVPool

SEGMENT, SEGMENTS, DIM, LAYERS, HEADS, PER_HEAD, HIDDEN, ROW = 64, 5, 8, 2, 2, 2, 12, 1
KEPT = np.array([[64, 16], [16, 32]])
SIZES = (96, 192)


class Attention(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.attn = RadixAttention(HEADS * PER_HEAD, DIM, DIM**-0.5, HEADS, layer_id=number)

    def forward(self, hidden_states, q, k, v, batch):
        return self.attn(q, k, v, batch)


def statistics(number: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    shapes = {"input_mean": (1, HIDDEN), "input_scale": (1, HIDDEN), "hidden": (1, 16, HIDDEN), "hidden_bias": (1, 16)}
    shapes |= {"skip": (HEADS, HIDDEN), "output": (HEADS, 16)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


class Served:
    def __init__(self) -> None:
        beside = torch.arange(2 * SEGMENTS, 2 * (SEGMENTS + 2 * 3))
        layout = SlabLayout(KEPT, DIM, SEGMENT)
        sizes = PoolSizes(layout, 4, OpenPages(SEGMENT, 28), 2 * SEGMENTS + len(beside), 2)
        self.layers = torch.nn.ModuleList(map(Attention, range(LAYERS)))
        store = SlabStore(
            layout,
            get_scorer("gate"),
            sizes.num_slots,
            sizes.num_rows,
            torch.float32,
            "cpu",
            q_per_kv=PER_HEAD,
            statistics=[statistics(number) for number in range(LAYERS)],
            pages=sizes.open_pages,
            softmax_scales=[layer.scaling for layer in attention_layers(self.layers, range(LAYERS))],
        )
        self.pool = RaggedTokenToKVPool(sizes, store, device="cpu", layer_numbers=range(LAYERS))
        self.pool.store.tails.table[:] = beside.view(2, 2, 3)
        pages = torch.arange(2 * SEGMENTS).view(2, SEGMENTS, 1) * SEGMENT
        self.table = (pages + torch.arange(SEGMENT)).flatten(1).int()
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool, model=self.layers, req_to_token_pool=SimpleNamespace(req_to_token=self.table)
        )
        self.backend = RaggedAttnBackend(runner, lambda store, _, in_view: TorchOps(store, in_view))
        self.graphs: dict[int, Graph] = {}

    def prefill(self, prefix: int, length: int) -> torch.Tensor:
        """Each layer called in turn: [layers, tokens, ...]."""
        batch = described(self.backend, prefix, length)
        with running(self.backend, batch):
            return torch.stack([layer(*inputs(n, prefix, length), batch) for n, layer in enumerate(self.layers)])

    def capture(self, size: int) -> None:
        self.graphs[size] = Graph(self, size)

    def replay(self, prefix: int, length: int) -> torch.Tensor:
        return self.graphs[min(size for size in SIZES if size >= length)].replay(prefix, length)


class Graph:
    """The buffers of a captured size, what SGLang does at its breaks, and what the graph does between them."""

    def __init__(self, served: Served, size: int) -> None:
        self.served = served
        self.buffers = [tuple(torch.zeros_like(x) for x in inputs(n, 0, size)) for n in range(LAYERS)]
        self.breaks, self.scores = [], []
        batch = described(served.backend, 0, size, row=0)
        capture = SimpleNamespace(
            _end_current_segment=lambda: None,
            _begin_new_segment=lambda: None,
            _barrier_fn=None,
            cuda_graph=SimpleNamespace(_break_fns=self.breaks),
        )
        operations, original = served.backend.operations, served.backend.operations.token_inputs

        def token_inputs(layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
            self.scores.append(original(layer, hidden_states))
            return self.scores[-1]

        operations.token_inputs = token_inputs
        with running(served.backend, batch, capture):
            self.outputs = [layer(*given, batch) for layer, given in zip(served.layers, self.buffers, strict=True)]
        operations.token_inputs = original

    def replay(self, prefix: int, length: int) -> torch.Tensor:
        backend = self.served.backend
        batch = described(backend, prefix, length)
        with running(backend, batch):
            for number, (given, scores) in enumerate(zip(self.buffers, self.scores, strict=True)):
                for buffer, new in zip(given, inputs(number, prefix, length), strict=True):
                    buffer.fill_(torch.nan)[:length] = new
                scores.copy_(backend.operations.token_inputs(number, given[0]))
                self.breaks[number]()
        return torch.stack([output[:length] for output in self.outputs])


def inputs(number: int, prefix: int, length: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, queries, keys and values of a layer, of tokens behind a prefix."""
    made = torch.Generator().manual_seed(number)
    every = torch.randn(SEGMENTS * SEGMENT, HIDDEN + (PER_HEAD + 2) * HEADS * DIM, generator=made)
    return every[prefix : prefix + length].split([HIDDEN, PER_HEAD * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)


def described(backend: RaggedAttnBackend, prefix: int, length: int, row: int = ROW) -> ForwardBatch:
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.zeros(length, dtype=torch.int64),
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([prefix + length]),
        seq_lens_cpu=torch.tensor([prefix + length]),
        out_cache_loc=torch.zeros(length, dtype=torch.int64),
        seq_lens_sum=prefix + length,
        extend_prefix_lens_cpu=[prefix],
        extend_seq_lens_cpu=[length],
    )
    batch.global_num_token_non_padded_cpu = length
    backend.init_forward_metadata(batch)
    return batch


@contextlib.contextmanager
def running(backend: RaggedAttnBackend, batch: ForwardBatch, capture=None):
    """What SGLang's runners say around a forward pass."""
    from sglang.srt.layers import radix_attention
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import enable_breakable_cuda_graph
    from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as scopes:
        patch.setattr(radix_attention, "get_attn_backend", lambda: backend)
        scopes.enter_context(set_forward_batch(batch))
        if capture is not None:
            scopes.enter_context(enable_breakable_cuda_graph())
            scopes.enter_context(prefill_graph_scope(full_graph=False))
            token = breakable_cuda_graph._current_capture_var.set(capture)
            scopes.callback(breakable_cuda_graph._current_capture_var.reset, token)
        yield


def test_replayed_chunks_are_what_called_layers_make_of_them():
    """Of two sizes, each replayed behind the capture of the other, with padding that is no number."""
    plain, graphs = Served(), Served()
    for size in reversed(SIZES):
        graphs.capture(size)
    for prefix, length in ((0, 170), (170, 90), (260, 7)):
        expected = plain.prefill(prefix, length)
        torch.testing.assert_close(graphs.replay(prefix, length), expected, msg=f"{length} behind {prefix}")
    sealed = torch.arange(SEGMENTS, SEGMENTS + 4)
    assert plain.pool.store.slabs[sealed].any()
    torch.testing.assert_close(graphs.pool.store.slabs[sealed], plain.pool.store.slabs[sealed])
