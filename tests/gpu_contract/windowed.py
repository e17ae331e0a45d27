"""A hybrid model: SGLang's Triton backend serves the layers with windows, on its pool beside the slabs."""

from __future__ import annotations

import functools
import pkgutil
from types import SimpleNamespace
from typing import Any

import sglang.srt.layers.attention.triton_backend as triton_backend
import sglang.srt.mem_cache.kv_index_translator as index_translator
import sglang.srt.mem_cache.memory_pool as memory_pool
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import sgl_ragged.serve.backend as backend_module
from sgl_ragged.attention.kernel_choice import make_operations
from sgl_ragged.features.windows.attention import window_backend
from sgl_ragged.features.windows.pool import RaggedHybridPool
from sgl_ragged.features.windows.serve import FEATURE as WINDOWS
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.profiles.geometry import WindowedLayers
from sgl_ragged.serve.backend import RaggedAttnBackend
from sgl_ragged.serve.pool import RaggedTokenToKVPool
from tests.gpu_contract.fake_tensor import CAPTURED
from tests.gpu_contract.recording import REC
from tests.gpu_contract.server import (
    CONTEXT,
    HEADS,
    LAYERS,
    ROWS,
    SEGMENT,
    SLOTS,
    kept_counts,
    make_store,
    request_table,
)

WINDOW, DIM, PER_HEAD = 128, 64, 8
"""As gpt-oss has them."""


class Published(SimpleNamespace):
    """SGLang's published settings, and parts of its runner: what is not given is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _publish() -> None:
    own = Published(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1)
    exec_ = Published(
        kernel=Published(triton_attention_num_kv_splits=8),
        dllm=Published(),
        deterministic=Published(enable_deterministic_inference=False),
        graph=Published(),
    )
    for name, value in {"get_exec": exec_, "get_spec": Published(), "get_parallel": own}.items():
        setattr(triton_backend, name, lambda value=value: value)
    triton_backend.get_schedule = lambda: Published(chunked_prefill_size=8192)
    triton_backend.cuda_graph_fully_disabled = lambda: False
    triton_backend.check_cuda_graph_backend = lambda *_: False
    triton_backend.get_device_core_count = lambda *_: 132
    triton_backend.mambaish_config = lambda _: None
    index_translator.get_parallel = lambda: own
    # That kernel of SGLang's is built by nvcc: two operations per layer stand for its one launch.
    memory_pool.can_use_store_cache = lambda *_: False
    backend_module.get_model = lambda: SimpleNamespace(quantization_param_path=None)
    for hook in WINDOWS.hooks:
        module, name = hook.target.rsplit(".", 1)
        wrapper = functools.partial(hook.function, pkgutil.resolve_name(hook.target))
        setattr(pkgutil.resolve_name(module), name, wrapper)


class HybridServer:
    def __init__(self) -> None:
        _publish()
        full, windowed = tuple(range(1, LAYERS, 2)), tuple(range(0, LAYERS, 2))
        layout = SlabLayout(kept_counts(0.5, len(full)), DIM, SEGMENT)
        with REC.quiet():
            store = make_store(layout, "keydiff", torch.bfloat16, [{}] * len(full), PER_HEAD)
            sizes = PoolSizes(layout, 2, store.tails.open_pages, SLOTS, ROWS)
            slabs = RaggedTokenToKVPool(sizes, store, device="cuda", layer_numbers=full)
            pool = RaggedHybridPool(
                slabs,
                WindowedLayers(windowed, WINDOW + 1, 2 * len(windowed) * HEADS * DIM),
                full,
                window_tokens=8192,
                num_heads=HEADS,
                dtype=torch.bfloat16,
                device="cuda",
            )
            pool.register_mapping(torch.zeros(SLOTS * SEGMENT + 1, dtype=torch.int64, device="cuda"))
            self.table = request_table()
            self.sinks = torch.zeros(HEADS * PER_HEAD, dtype=torch.bfloat16, device="cuda")
        self.translator = KVIndexTranslator(
            req_to_token=self.table,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=pool,
            page_size=SEGMENT,
            device="cuda",
        )
        self.model = torch.nn.ModuleList(
            RadixAttention(
                HEADS * PER_HEAD, DIM, DIM**-0.5, HEADS, layer_id=n, sliding_window_size=WINDOW if n in windowed else -1
            )
            for n in range(LAYERS)
        )
        config = Published(
            attention_arch=AttentionArch.MHA,
            context_len=CONTEXT,
            head_dim=DIM,
            v_head_dim=DIM,
            swa_v_head_dim=DIM,
            is_encoder_decoder=False,
            get_max_num_attention_heads=lambda: HEADS * PER_HEAD,
            get_num_kv_heads=lambda *_: HEADS,
            hf_config=Published(architectures=["GptOssForCausalLM"]),
            hf_text_config=Published(),
            num_hidden_layers=LAYERS,
        )
        runner = Published(
            token_to_kv_pool=pool,
            model=self.model,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table, size=ROWS - 1),
            sliding_window_size=WINDOW,
            page_size=SEGMENT,
            kv_index_translator=self.translator,
            device="cuda",
            gpu_id=0,
            decode_num_tokens_per_req=lambda *_, **__: 1,
            model_config=config,
            is_draft_worker=False,
            spec_algorithm=Published(is_dspark=lambda: False),
        )
        REC.serving, REC.compiled = False, {}
        CAPTURED.forget()
        with REC.during("start-up"):
            others = window_backend(runner, "triton")
            self.backend = RaggedAttnBackend(runner, functools.partial(make_operations, "triton"), others=others)

    def batch(self, mode: ForwardMode, rows: list[int], ends: list[int], lengths: list[int] | None = None) -> Any:
        new = lengths or [1] * len(ends)
        with REC.quiet():
            prefixes = [end - count for end, count in zip(ends, new, strict=True)]
            batch = Published(
                forward_mode=mode,
                batch_size=len(ends),
                req_pool_indices=torch.tensor(rows).to("cuda"),
                req_pool_indices_cpu=torch.tensor(rows),
                seq_lens=torch.tensor(ends).to("cuda"),
                seq_lens_cpu=torch.tensor(ends),
                seq_lens_sum=sum(ends),
                out_cache_loc=torch.zeros(sum(new), dtype=torch.int64, device="cuda"),
                extend_prefix_lens_cpu=prefixes,
                extend_seq_lens_cpu=lengths,
                extend_prefix_lens=torch.tensor(prefixes).to("cuda"),
                extend_seq_lens=torch.tensor(new).to("cuda"),
            )
            self.translator.own_plan(batch).bind(batch, self.translator)
        return batch

    def forward(self, batch: Any, tokens: int, call: Any) -> None:
        for number, layer in enumerate(self.model):
            with REC.quiet():
                q = torch.zeros(tokens, HEADS * PER_HEAD * DIM, dtype=torch.bfloat16, device="cuda")
                k, v = (torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            REC.layer = number
            call(q, k, v, layer, batch, sinks=self.sinks)
            REC.layer = None

    def step(self, phase: str, batch: Any, tokens: int, call: Any) -> None:
        with REC.during(phase):
            self.backend.init_forward_metadata(batch)
            self.forward(batch, tokens, call)


def windows(name: str) -> None:
    """Whether kernels have been compiled is not asked: SGLang's are when they are first used."""
    server = HybridServer()
    backend = server.backend
    for said, rows, ends, lengths in (
        ("1,024 tokens", [1], [1024], [1024]),
        ("8 requests", list(range(1, 9)), [556] * 8, [300] * 8),
    ):
        batch = server.batch(ForwardMode.EXTEND, rows, ends, lengths)
        server.step(f"{name}: extend, {said}", batch, sum(lengths), backend.forward_extend)
    batch = server.batch(ForwardMode.DECODE, [1, 2, 3], [600, 601, 602])
    server.step(f"{name}: decode", batch, 3, backend.forward_decode)
    with REC.during(f"{name}: before captures"):
        backend.init_cuda_graph_state(8, 8)
    batch = server.batch(ForwardMode.DECODE, [0] * 8, [1] * 8)
    with REC.during(f"{name}: capture of 8"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with REC.capture():
            server.forward(batch, 8, backend.forward_decode)
    batch = server.batch(ForwardMode.DECODE, [1, 2, 3, 0, 0, 0, 0, 0], [603, 604, 605, 1, 1, 1, 1, 1])
    with REC.during(f"{name}: replay"):
        backend.init_forward_metadata_out_graph(batch)
