"""One rank's pool, backend and layers, and what SGLang's runners do with them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

import sgl_ragged.serve.backend as backend_module
from sgl_ragged.attention.kernel_choice import make_operations, make_sealer
from sgl_ragged.attention.operations import commit
from sgl_ragged.fitting.fitted import StoreFit, without_codebook
from sgl_ragged.mem_pool.kv_dtype import is_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_format import WIDE, SlabFormat
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.profiles.budgets import fit_kept
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.backend import RaggedAttnBackend
from sgl_ragged.serve.pool import RaggedTokenToKVPool
from tests.gpu_contract.fake_tensor import CAPTURED
from tests.gpu_contract.recording import REC

LAYERS, HEADS, PER_HEAD, DIM, SEGMENT = 4, 8, 4, 128, 256
"""Heads as in Llama-3.1-8B; counts per layer do not depend on how many there are."""

HIDDEN, FEATURES, CODED = 64, 16, 84
"""Of the gate and of the codebook; no count depends on them."""

ROWS, SLOTS, CONTEXT = 9, 80, 32768


def kept_counts(ratio: float, layers: int = LAYERS) -> np.ndarray:
    """Budgets that differ between heads, as a profile's do: int64 [layers, heads]."""
    return fit_kept(np.random.default_rng(1).lognormal(0.0, 0.8, (layers, HEADS)), ratio, SEGMENT)


def make_store(
    layout: SlabLayout,
    scorer: str,
    dtype: torch.dtype,
    statistics: Sequence[Mapping[str, torch.Tensor]],
    per_head: int = PER_HEAD,
) -> SlabStore:
    """A store on the device, sealed by kernels, as the worker makes it."""
    scales = [layout.head_dim**-0.5] * layout.num_layers
    return SlabStore(
        layout,
        get_scorer(scorer),
        SLOTS,
        ROWS,
        dtype,
        "cuda",
        q_per_kv=per_head,
        statistics=without_codebook(statistics),
        query_dtype=torch.bfloat16,
        softmax_scales=scales,
        sealer=make_sealer("triton", layout, "cuda"),
        corrector=StoreFit.from_statistics(layout, statistics, scales, fp8=is_fp8(dtype)),
    )


class Called(RadixAttention):
    """Hands its arguments to the backend at once."""

    def forward(self, call: Any, q: Any, k: Any, v: Any, batch: Any, **more: Any) -> Any:
        return call(q, k, v, self, batch, **more)


class Attention(torch.nn.Module):
    def __init__(self, number: int, heads: int = HEADS) -> None:
        super().__init__()
        self.attn = Called(heads * PER_HEAD, DIM, DIM**-0.5, heads, layer_id=number)

    def forward(self, positions: Any, hidden_states: Any, run: Any) -> Any:
        return run(self.attn)


class Server:
    """
    Args:
        fitted: whether there is a codebook. sinks: whether the model has learned sinks.
        attach: puts features into the pool, which it is called with beside the request table.
    """

    def __init__(
        self,
        scorer: str = "gate",
        ratio: float = 0.5,
        form: SlabFormat = WIDE,
        dtype: torch.dtype = torch.bfloat16,
        fitted: bool = False,
        sinks: bool = False,
        layout: SlabLayout | None = None,
        attach: Any = None,
        epilogues: Sequence[Any] = (),
    ) -> None:
        self.dtype, self.graphs = dtype, ()
        layout = layout or SlabLayout(kept_counts(ratio), DIM, SEGMENT, form=form)
        self.heads, self.layer_count = layout.num_heads, layout.num_layers
        self.reads_hidden_states = get_scorer(scorer).reads_hidden_states
        with REC.quiet():
            self.sinks = torch.zeros(self.heads * PER_HEAD, dtype=torch.bfloat16, device="cuda") if sinks else None
            statistics = [self._statistics(scorer, fitted) for _ in range(layout.num_layers)]
            store = make_store(layout, scorer, dtype, statistics)
            sizes = PoolSizes(layout, dtype.itemsize, store.tails.open_pages, SLOTS, ROWS)
            self.pool = RaggedTokenToKVPool(sizes, store, device="cuda", layer_numbers=range(layout.num_layers))
            self.table = request_table()
            # Any extra pages will do: what is read from them is not looked at.
            beside = torch.arange(ROWS * 2 * store.tails.open_pages.most).view(ROWS, 2, -1) % (SLOTS - 1) + 1
            self.pool.store.tails.table.copy_(beside.to(torch.int32).to("cuda"))
            self.pool.store.tails.table[0] = 0
            if attach is not None:
                attach(self.pool, self.table)
        self.model = torch.nn.ModuleList(Attention(n, self.heads) for n in range(layout.num_layers))
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            model=self.model,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )
        backend_module.get_model = lambda: SimpleNamespace(quantization_param_path=None)
        REC.serving, REC.compiled = False, {}
        CAPTURED.forget()
        with REC.during("start-up"):
            make = functools.partial(make_operations, "triton")
            self.backend = RaggedAttnBackend(self.runner, make, epilogues=epilogues)

    def _statistics(self, scorer: str, fitted: bool) -> dict[str, torch.Tensor]:
        made = functools.partial(torch.randn, device="cuda")
        found = {}
        if scorer == "gate":
            found = {
                "input_mean": made(1, HIDDEN),
                "input_scale": made(1, HIDDEN),
                "hidden": made(1, FEATURES, HIDDEN),
                "hidden_bias": made(1, FEATURES),
                "skip": made(self.heads, HIDDEN),
                "output": made(self.heads, FEATURES),
            }
        if fitted:
            found |= {
                QUERIES: made(self.heads, CODED, DIM).half(),
                MASSES: made(self.heads, 2, CODED),
                OUTPUTS: made(self.heads, 2, CODED, DIM).half(),
                ROPE[0]: made(1, DIM // 2).double(),
                ROPE[1]: torch.arange(DIM, device="cuda")[None],
            }
        return found

    def _forward(self, batch: Any, tokens: int, call: Any) -> None:
        with REC.quiet():
            # Parts of one projection, so tokens are strided.
            sizes = [self.heads * PER_HEAD * DIM, self.heads * DIM, self.heads * DIM]
            q, k, v = torch.zeros(tokens, sum(sizes), dtype=torch.bfloat16, device="cuda").split(sizes, dim=-1)
            k, v = (part.view(-1, self.heads, DIM) for part in (k, v))
            states = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        more = {} if self.sinks is None else {"sinks": self.sinks}
        for number, layer in enumerate(self.model):
            REC.layer = number
            try:
                layer(None, states, lambda attn: attn(call, q, k, v, batch, **more))
            finally:
                REC.layer = None

    def extend(self, phase: str, rows: Sequence[int], prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        with REC.quiet():
            ends = torch.tensor([p + n for p, n in zip(prefixes, lengths, strict=True)])
            batch = SimpleNamespace(
                forward_mode=ForwardMode.EXTEND,
                batch_size=len(rows),
                rids=[f"r{row}" for row in rows],
                req_pool_indices=torch.tensor(list(rows)).to("cuda"),
                req_pool_indices_cpu=torch.tensor(list(rows)),
                seq_lens=ends.to("cuda"),
                seq_lens_cpu=ends,
                extend_prefix_lens_cpu=list(prefixes),
                extend_seq_lens_cpu=list(lengths),
            )
        self._step(phase, batch, sum(lengths), self.backend.forward_extend)

    def decode(self, phase: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """A step without a graph; lengths count the new token."""
        self._step(phase, self._batch(rows, lengths), len(rows), self.backend.forward_decode)

    def verify(self, phase: str, rows: Sequence[int], prefixes: Sequence[int], width: int) -> None:
        """A chain of drafts behind each request's tokens, and one of them accepted."""
        batch = self._batch(rows, prefixes)
        batch.forward_mode, batch.spec_info = ForwardMode.TARGET_VERIFY, SimpleNamespace(draft_token_num=width)
        self._step(phase, batch, width * len(rows), self.backend.forward_extend)
        with REC.during(phase):
            commit(self.pool.store, self.table, batch.req_pool_indices, [one + 1 for one in prefixes])

    def _step(self, phase: str, batch: Any, tokens: int, call: Any) -> None:
        REC.serving = True
        with REC.during(phase):
            try:
                self.backend.init_forward_metadata(batch)
                self._forward(batch, tokens, call)
            except Exception as error:
                REC.add("error", type(error).__name__, note=str(error))
        REC.serving = False

    def dummy(self, phase: str) -> None:
        """The batches that SGLang makes up to tune other kernels: no names, no rows on the host."""
        with REC.quiet():
            none = functools.partial(torch.zeros, 8, dtype=torch.int64)
            common: dict[str, Any] = dict(batch_size=8, rids=None, req_pool_indices_cpu=None)
            common |= dict(
                req_pool_indices=none(device="cuda"), seq_lens=none(device="cuda") + 1, seq_lens_cpu=none() + 1
            )
            decode = SimpleNamespace(forward_mode=ForwardMode.DECODE, **common)
            lengths = dict(extend_prefix_lens_cpu=[0] * 8, extend_seq_lens_cpu=[1] * 8)
            extend = SimpleNamespace(forward_mode=ForwardMode.EXTEND, **common, **lengths)
        self._step(f"{phase}: made-up decode", decode, 8, self.backend.forward_decode)
        self._step(f"{phase}: made-up extend", extend, 8, self.backend.forward_extend)

    def _batch(self, rows: Sequence[int], lengths: Sequence[int]) -> SimpleNamespace:
        with REC.quiet():
            return SimpleNamespace(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(rows),
                rids=[f"r{row}" for row in rows],
                req_pool_indices=torch.tensor(list(rows)).to("cuda"),
                req_pool_indices_cpu=torch.tensor(list(rows)),
                seq_lens=torch.tensor(list(lengths)).to("cuda"),
                seq_lens_cpu=torch.tensor(list(lengths)),
                seq_lens_sum=sum(lengths),
                **dict.fromkeys(
                    ("max_seq_len_host", "out_cache_loc", "out_cache_loc_virtual", "kv_loc_plan", "kv_loc_cols")
                ),
                **dict.fromkeys(("max_seq_len_override", "spec_info", "lora_ids")),
                can_run_decode_cuda_graph=True,
            )

    def capture(self, phase: str, sizes: Sequence[int] = (8, 4, 1), width: int = 0) -> None:
        """SGLang's graph runner captures a step of every size, largest first: of decode, or of chains of `width`."""
        self.graphs, self.width, largest = tuple(sizes), width, max(sizes)
        mode, run = self._captured_mode()
        with REC.quiet():
            zeros = functools.partial(torch.zeros, largest, dtype=torch.int64)
            self.buffers = SimpleNamespace(
                **{name: zeros(device="cuda") for name in ("input_ids", "positions", "req_pool_indices", "seq_lens")},
                seq_lens_cpu=zeros(),
                mamba_track_indices=None,
                encoder_lens=None,
            )
        REC.serving = True
        with REC.during(f"{phase}: before captures"):
            self.backend.init_cuda_graph_state(largest, largest * max(width, 1))
        self._pad()
        for size in sizes:
            own = self.buffers
            batch = SimpleNamespace(
                forward_mode=mode,
                batch_size=size,
                rids=None,
                spec_info=SimpleNamespace(draft_token_num=width),
                req_pool_indices=own.req_pool_indices[:size],
                seq_lens=own.seq_lens[:size],
                seq_lens_cpu=own.seq_lens_cpu[:size],
            )
            with REC.during(f"{phase}: capture of {size}"):
                self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
                with REC.capture():
                    self.backend.init_forward_metadata_in_graph(batch)
                    self._forward(batch, size * max(width, 1), run)
        REC.serving = False

    def _captured_mode(self) -> tuple[ForwardMode, Any]:
        if self.width:
            return ForwardMode.TARGET_VERIFY, self.backend.forward_extend
        return ForwardMode.DECODE, self.backend.forward_decode

    def _pad(self) -> None:
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        with REC.quiet():
            self.buffers.req_pool_indices.zero_()
            self.buffers.seq_lens.fill_(fill)
            self.buffers.seq_lens_cpu.fill_(fill)

    def replay(self, phase: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """A step by a captured graph: what is done before it, with SGLang's own view of the padded batch."""
        size = min(size for size in self.graphs if size >= len(rows))
        batch, own = self._batch(rows, lengths), self.buffers
        batch.spec_info = SimpleNamespace(draft_token_num=self.width)
        self._pad()
        with REC.quiet():
            own.req_pool_indices[: len(rows)].copy_(batch.req_pool_indices)
            own.seq_lens[: len(rows)].copy_(batch.seq_lens)
            own.seq_lens_cpu[: len(rows)] = batch.seq_lens_cpu
            view = build_replay_fb_view(
                forward_batch=batch,
                buffers=own,
                bs=size,
                raw_bs=len(rows),
                num_tokens=size * max(self.width, 1),
                global_num_tokens_cpu=None,
                seq_len_fill_value=self.backend.get_cuda_graph_seq_len_fill_value(),
                capture_forward_mode=self._captured_mode()[0],
                is_encoder_decoder=False,
            )
        REC.serving = True
        with REC.during(phase):
            try:
                self.backend.init_forward_metadata_out_graph(view)
            except Exception as error:
                REC.add("error", type(error).__name__, note=str(error))
            for read in CAPTURED.freed():
                REC.add("freed", read)
        REC.serving = False


def request_table() -> torch.Tensor:
    """int32 [rows, context and some more] as SGLang has it: requests' segments lie anywhere."""
    segments = CONTEXT // SEGMENT
    table = torch.zeros(ROWS, CONTEXT + 5, dtype=torch.int32)
    for row in range(1, ROWS):
        slots = 1 + (torch.arange(segments) + (row - 1) * 7) % (SLOTS - 1)
        table[row, :CONTEXT] = (slots[:, None] * SEGMENT + torch.arange(SEGMENT)).flatten()
    return table.to("cuda")
