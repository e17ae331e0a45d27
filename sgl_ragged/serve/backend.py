"""The SGLang attention backend: one class that describes batches and calls the attention operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_model

from sgl_ragged.attention.epilogue import Epilogue
from sgl_ragged.attention.operations import Operations, commit
from sgl_ragged.attention.sinks import with_sinks
from sgl_ragged.attention.view import ExtendView, extend_view
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.kv_dtype import KvScales
from sgl_ragged.mem_pool.segments import SegmentTable
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.serve.kv_scales import kv_scales
from sgl_ragged.serve.pool import RaggedTokenToKVPool, slab_pool

TOKEN_INPUTS = "ragged_token_inputs"
"""Keyword of attention layers' calls: what operations make of what entered the layer, [tokens, ...], for scorers that
read hidden states (`Operations.token_inputs`)."""


class Observer(Protocol):
    """Interface for watching prefill; `calib.recorder` implements it."""

    reads_hidden_states: bool
    """True where `extend` is to be given what enters the attention layers."""

    def for_rank(self, rank: int) -> Observer:
        """The observer of one tensor-parallel rank."""
        ...

    def prepare(self, model: torch.nn.Module, store: SlabStore) -> None:
        """Called once, when model and store are there."""
        ...

    def extend(
        self,
        store: SlabStore,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendView,
        scorer_inputs: torch.Tensor | None,
        hidden_states: torch.Tensor | None,
    ) -> None:
        """Called after `Operations.extend` with its arguments; must not change them.

        `hidden_states`: [tokens, hidden size], what entered the attention layer; None unless `reads_hidden_states`.
        """
        ...


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Queries [tokens, heads, q_per_kv, d], keys and values [tokens, heads, d], and the scorer's scorer_inputs."""


class RaggedAttnBackend(AttentionBackend):
    """Attention over slabs and tails.

    Owns no memory: the pool's store holds slabs and tails, SGLang's request table says which are whose. Layers that are
    not in slabs are left to a backend of their own (`others`).
    """

    def __init__(
        self,
        model_runner: Any,
        make_operations: Callable[[SlabStore, int, torch.Tensor | None], Operations],
        observer: Observer | None = None,
        epilogues: Sequence[Epilogue] = (),
        others: AttentionBackend | None = None,
    ) -> None:
        """
        Args:
            make_operations: makes the operations for a store, the most segments that a request sees, and the table of
                segments in view if requests do not see all of theirs (`Operations`).
            epilogues: run after attention, before the pool's own epilogues.
            others: backend of layers that are not in slabs; None if all are.
        """
        super().__init__()
        pool = slab_pool(model_runner.token_to_kv_pool)
        if not isinstance(pool, RaggedTokenToKVPool):
            raise RaggedConfigError(f"the ragged attention backend needs the ragged pool, got {type(pool).__name__}")
        self.others: Any = others
        layers = attention_layers(model_runner.model, pool.layer_numbers)
        self.layer_indices = {layer.layer_id: number for number, layer in enumerate(layers)}
        self.pool, self.store = pool, pool.store
        assert self.store.softmax_scales == tuple(layer.scaling for layer in layers), "the store is that of the model"
        self._with_scales = [*layers, *getattr(others, "windowed", ())]
        self.kv_scales: list[KvScales] = []
        if self.store.fp8:
            self.use_scales(self.found_scales())
        self.observer = observer
        if observer is not None:
            observer.prepare(model_runner.model, self.store)
        self.epilogues = (*epilogues, *pool.epilogues)
        self._behind = {
            number: [one for one in self.epilogues if one.needed(number)] for number in self.layer_indices.values()
        }
        self._observed: ExtendView | None = None
        self._token_inputs: torch.Tensor | None = None
        self._hidden_states: dict[int, torch.Tensor] = {}
        if self.store.scorer.reads_hidden_states or (observer is not None and observer.reads_hidden_states):
            self._read_hidden_states(model_runner.model)
        self.segment = pool.page_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        most = SegmentTable(self.req_to_token, self.segment).most_segments
        self.views = pool.views
        in_view = None if self.views is None else self.views.table
        most_seen = most if self.views is None else min(most, self.views.limit)
        self.operations = make_operations(self.store, most_seen, in_view)
        self.forward_metadata: Any = None

    def found_scales(self) -> list[KvScales]:
        """Return the FP8 scales on the model's layers, those of sliding windows last; `kv_scales` are the ones in use.

        Raises:
            RaggedConfigError: as `kv_scales.kv_scales` and `KvScales` do.
        """
        return kv_scales(self._with_scales, get_model().quantization_param_path)

    def use_scales(self, scales: list[KvScales]) -> None:
        """Store and read with these scales. The cache must be empty."""
        full = len(self.layer_indices)
        self.kv_scales = scales
        self.store.use_kv_scales(scales[:full])
        if scales[full:]:
            self.others.use_scales(scales[full:])

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        # A decode step copies rows, lengths and slots to buffers of its own before its layers run. What it reads after
        # that, slabs and tails, is written by forward passes alone, in stream order.
        own = SharedReadEnds.PRE_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN
        return own if self.others is None else SharedReadEnds.max_of([own, self.others.shared_read_ends(fm)])

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Seal what the last decode step filled, then describe this batch."""
        mode = forward_batch.forward_mode
        self.store.begin_batch()
        if mode.is_decode():
            self._describe_decode(forward_batch)
            if self.others is not None:
                self.others.init_forward_metadata(forward_batch)
            return
        if self.others is not None:
            self.others.init_forward_metadata(forward_batch)
        self.store.flush_pending_seals()
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_target_verify():
            self._describe_chains(forward_batch)
            return
        prefixes, lengths = list(forward_batch.extend_prefix_lens_cpu), list(forward_batch.extend_seq_lens_cpu)
        rows = forward_batch.req_pool_indices
        seen = None
        # Batches that SGLang makes up to tune kernels name no requests: all of their tokens are in row 0.
        if self.views is not None and forward_batch.rids is not None:
            seen = self.views.seen(forward_batch.req_pool_indices_cpu.tolist(), prefixes, lengths)
        self.forward_metadata = self.operations.describe_extend(self.req_to_token, rows, prefixes, lengths, seen)
        if self.observer is not None:
            self._observed = extend_view(self.req_to_token, rows, prefixes, lengths, self.segment)
        for epilogue in self.epilogues:
            epilogue.describe(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserve buffers before any graph is captured: padded batches may exceed the rows of the request table."""
        if not self.operations.captures_graphs:
            raise RaggedConfigError("these attention kernels cannot be captured; use --disable-cuda-graph")
        self.operations.reserve(max_bs)
        if self.others is not None:
            self.others.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return 1: padded requests have one token, in row 0, which belongs to no request."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Seal, then describe the batch, before the graph of a decode or verification step is captured or replayed.

        Refills the buffers that a captured graph reads. A capture runs on made-up requests, so nothing is sealed.
        """
        self.store.begin_batch()
        if not forward_batch.forward_mode.is_target_verify():
            self._describe_decode(forward_batch, in_capture)
        else:
            if not in_capture:
                self.store.flush_pending_seals()
            self._describe_chains(forward_batch, in_capture)
        if self.others is not None:
            self.others.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self.others is not None:
            self.others.init_forward_metadata_in_graph(forward_batch)

    def _describe_chains(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.forward_metadata = self.operations.describe_chains(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.seq_lens_cpu.tolist(),
            forward_batch.spec_info.draft_token_num,
        )
        if not in_capture:
            for epilogue in self.epilogues:
                epilogue.describe(forward_batch)

    def _describe_decode(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if not in_capture:
            self.store.flush_pending_seals()
            if self.views is not None:
                self.views.refresh()
        self.forward_metadata = self.operations.describe_decode(
            self.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.seq_lens_cpu
        )
        if not in_capture:
            lengths = forward_batch.seq_lens_cpu.tolist()
            commit(self.store, self.req_to_token, forward_batch.req_pool_indices, lengths)
            for epilogue in self.epilogues:
                epilogue.describe(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """Compute attention of a chunk; q is [tokens, query heads * head_dim], k and v [tokens, heads, head_dim].

        Raises RaggedConfigError where the model asks for more than that (`_refuse_call`).
        """
        if layer.layer_id not in self.layer_indices:
            return self._other().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)
        sinks, token_inputs = more.pop("sinks", None), more.pop(TOKEN_INPUTS, None)
        _refuse_call(layer, k, v, save_kv_cache, more)
        output, heads = self._attend(self.operations.extend, q, k, v, layer, forward_batch, sinks, token_inputs)
        if self.observer is not None:
            assert self._observed is not None, "an extend batch must have been described first"
            queries, keys, values, inputs = heads
            number = self.layer_indices[layer.layer_id]
            hidden_states = self._hidden_states.pop(layer.layer_id, None)
            self.observer.extend(self.store, number, queries, keys, values, self._observed, inputs, hidden_states)
        return output

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """Compute attention of one token per request; shapes and errors as in `forward_extend`."""
        if layer.layer_id not in self.layer_indices:
            return self._other().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **more)
        sinks, token_inputs = more.pop("sinks", None), more.pop(TOKEN_INPUTS, None)
        _refuse_call(layer, k, v, save_kv_cache, more)
        return self._attend(self.operations.decode, q, k, v, layer, forward_batch, sinks, token_inputs)[0]

    def _other(self) -> AttentionBackend:
        assert self.others is not None, "layers that are not in slabs are in another pool"
        return self.others

    def _attend(
        self,
        operation: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        sinks: torch.Tensor | None,
        token_inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Heads]:
        """Return the output of `operation` for one layer, [tokens, query heads * head_dim], and `_heads` of its inputs.

        sinks: [query heads], the layer's learned sinks, or None. token_inputs: TOKEN_INPUTS of the call.
        """
        queries, keys, values, scorer_inputs = heads = self._heads(q, k, v, layer, token_inputs)
        number = self.layer_indices[layer.layer_id]
        if self.pool.layer_transfer_counter is not None:
            # Slabs on their way from the host: this layer's part must be there.
            self.pool.layer_transfer_counter.wait_until(number)
        if not self._behind[number] and sinks is None:
            return operation(number, queries, keys, values, self.forward_metadata, scorer_inputs).flatten(1), heads
        if not self._behind[number] and self.operations.adds_sinks:
            output = operation(number, queries, keys, values, self.forward_metadata, scorer_inputs, None, sinks)
            return output.flatten(1), heads
        lse = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
        output = operation(number, queries, keys, values, self.forward_metadata, scorer_inputs, lse)
        for epilogue in self._behind[number]:
            output = epilogue.apply(number, queries, output, lse, forward_batch)
        return (output if sinks is None else with_sinks(output, lse, sinks)).flatten(1), heads

    def _heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, token_inputs: Any
    ) -> Heads:
        """Return the model's tensors split by heads."""
        heads, dim = layer.tp_k_head_num, layer.head_dim
        queries = q.reshape(-1, heads, layer.tp_q_head_num // heads, dim)
        scorer_inputs = None
        if self.store.scorer.reads_hidden_states:
            scorer_inputs = token_inputs[: len(queries)]
        elif self.store.has_scorer_inputs:
            scorer_inputs = queries.flatten(2)
        return queries, k.reshape(-1, heads, dim), v.reshape(-1, heads, dim), scorer_inputs

    def _read_hidden_states(self, model: torch.nn.Module) -> None:
        """Hook attention layers: score tokens from the hidden states that enter, or keep these for the observer."""
        for parent in model.modules():
            for child in parent.children():
                if isinstance(child, RadixAttention) and child.layer_id in self.layer_indices:
                    parent.register_forward_pre_hook(self._token_input_hook(child.layer_id, parent), with_kwargs=True)
                    child.register_forward_pre_hook(self._hand_over, with_kwargs=True)

    def _hand_over(self, _layer: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Give an attention layer the scorer inputs made of its parent's hidden states.

        As an argument: graphs of prefill call the backend again with the arguments of their capture, and each size of
        chunk has buffers of its own.
        """
        found, self._token_inputs = self._token_inputs, None
        return None if found is None else (args, kwargs | {TOKEN_INPUTS: found})

    def _token_input_hook(self, layer_id: int, parent: torch.nn.Module) -> Callable[..., None]:
        number = self.layer_indices[layer_id]
        signature = inspect.signature(parent.forward)
        if "hidden_states" not in signature.parameters:
            raise RaggedConfigError(
                f"{type(parent).__name__} takes no hidden_states, so no scorer can read them; use another than "
                f"fastkvzip and gate"
            )

        def hook(_module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            hidden_states = signature.bind(*args, **kwargs).arguments["hidden_states"]
            if self.store.scorer.reads_hidden_states:
                # Observers are shown scores, not what operations make of them.
                of = self.operations.token_inputs if self.observer is None else self.operations.token_scores
                self._token_inputs = of(number, hidden_states)
            if self.observer is not None and self.observer.reads_hidden_states:
                self._hidden_states[layer_id] = hidden_states

        return hook


def _refuse_call(layer: RadixAttention, k: Any, v: Any, save_kv_cache: bool, more: dict[str, Any]) -> None:
    """Raise RaggedConfigError for calls beyond causal attention to the keys that they bring.

    SGLang hands a layer's extra keywords on to the backend; one that is dropped would change the output in silence.
    """
    asked = [name for name, value in more.items() if value is not None]
    if k is None or v is None:
        asked.append("attention without keys and values of its own")
    if not save_kv_cache:
        asked.append("save_kv_cache=False")
    if asked:
        raise RaggedConfigError(
            f"layer {layer.layer_id} asks attention for {', '.join(asked)}, which --kv-pool ragged does not support; "
            f"use --kv-pool token"
        )


def attention_layers(model: torch.nn.Module, layer_numbers: Sequence[int]) -> list[RadixAttention]:
    """Return the model's layers with full attention, in order.

    Args:
        layer_numbers: the layers that the pool holds.

    Raises:
        RaggedConfigError: the model has other layers with full attention, or their attention is of another kind.
    """
    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    layers = [module for module in found if module.sliding_window_size <= 0]
    numbers, wanted = sorted(module.layer_id for module in layers), list(layer_numbers)
    if numbers != wanted:
        raise RaggedConfigError(
            f"the loaded model attends to everything in layers {numbers}, and by its config keys and values are those "
            f"of layers {wanted} (layers that share them, or windows that the config does not tell of?), which "
            f"--kv-pool ragged does not support; use --kv-pool token"
        )
    for module in layers:
        reasons = (
            (module.logit_cap > 0, "logit capping"),
            (module.is_cross_attention, "cross-attention"),
            (module.attn_type != AttentionType.DECODER, "non-causal attention"),
            (module.xai_temperature_len > 0, "a temperature per position"),
            (module.qk_head_dim != module.v_head_dim, "different key and value dimensions"),
        )
        found = [reason for applies, reason in reasons if applies]
        if found:
            raise RaggedConfigError(
                f"layer {module.layer_id} uses {', '.join(found)}, which --kv-pool ragged does not support "
                f"(seen in the loaded model); use --kv-pool token"
            )
    return sorted(layers, key=lambda module: module.layer_id)
