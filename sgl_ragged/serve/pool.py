"""SGLang's view of the pool: a KV cache whose pages are slabs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch

from sgl_ragged.attention.epilogue import Epilogue
from sgl_ragged.attention.self_check import MakeStore, SelfCheck
from sgl_ragged.features.drafts.chains import require_chains
from sgl_ragged.mem_pool.open_segments import OpenSegments
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.serve.sglang_pools import MHATokenToKVPool


@runtime_checkable
class Attached(Protocol):
    """A component attached to the pool, as operators see it.

    gauges, counters: by name, what they mean. label: what the counters are counted by, if by anything.
    """

    @property
    def gauges(self) -> Mapping[str, str]: ...

    @property
    def counters(self) -> Mapping[str, str]: ...

    @property
    def label(self) -> str: ...

    def readings(self) -> Mapping[tuple[str, str], float]:
        """Return values of gauges and counters by name and label value, which is empty without a label."""
        ...


class Views(Protocol):
    """The sealed segments that requests see, if not all; `history.histories.Histories` implements it.

    limit: most segments that a request sees.
    """

    @property
    def limit(self) -> int: ...

    @property
    def table(self) -> torch.Tensor:
        """Table of visible segments, as `Operations.in_view` has it."""
        ...

    def seen(self, rows: Sequence[int], prefixes: Sequence[int], lengths: Sequence[int]) -> Any:
        """Return the argument `seen` of `Operations.describe_extend` for chunks of requests. Changes the state."""
        ...

    def refresh(self) -> None:
        """Bring `table` up to date before a decode step. Changes the state."""
        ...


class RaggedTokenToKVPool(MHATokenToKVPool):
    """The token-to-KV pool whose pages SGLang's allocator and radix tree hand out.

    Page i is slab i of `store`. There is no buffer that can be indexed by token, so methods that return
    one raise: their callers would read or write the wrong bytes. Features put what they run here: `attached` by their
    names, `views` where requests do not see all of their history, `epilogues` after attention, and `fixed_weights`: why
    weights cannot be updated at run time. `on_flush` is called when the cache was flushed, `on_free` with the pages
    that are freed, int64. `self_check` has the result of the kernels' check; `make_small_store` makes its store, and is
    None afterwards.
    """

    def __init__(
        self,
        sizes: PoolSizes,
        store: SlabStore,
        *,
        device: str,
        layer_numbers: Sequence[int],
    ) -> None:
        """Make the pool over a store.

        Args:
            sizes: those that the store was made with.
            store: holds slabs and tails.
            device: of the store, as SGLang names it.
            layer_numbers: the model's layers that the store holds; the pool counts them from 0.
        """
        self.sizes = sizes
        self.store = store
        self.layer_numbers = tuple(layer_numbers)
        self.attached: dict[str, Any] = {}
        self.views: Views | None = None
        self.epilogues: list[Epilogue] = []
        self.fixed_weights: str | None = None
        self.make_small_store: MakeStore | None = None
        self.self_check: SelfCheck | None = None
        self.on_flush: list[Callable[[], None]] = []
        self.on_free: list[Callable[[torch.Tensor], None]] = []
        super().__init__(
            size=sizes.max_total_tokens,
            page_size=sizes.layout.segment,
            dtype=store.dtype,
            head_num=sizes.layout.num_heads,
            head_dim=sizes.layout.head_dim,
            layer_num=sizes.layout.num_layers,
            device=device,
            enable_memory_saver=False,
            start_layer=0,
            end_layer=len(layer_numbers),
            enable_alt_stream=False,
        )

    @property
    def observed(self) -> list[Attached]:
        """Return the attached components that have metrics."""
        return [one for one in self.attached.values() if isinstance(one, Attached)]

    def _create_buffers(self) -> None:
        self.open_segments = OpenSegments(self.store)

    def _clear_buffers(self) -> None:
        del self.open_segments, self.store

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = self.store.nbytes // 2
        return half, half

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Do nothing: accepted drafts of chains are in place already (`require_chains`, with its errors)."""
        require_chains(tgt_loc, src_loc)

    def _no_token_access(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "the ragged KV pool has no per-token buffers; this SGLang feature is not supported with --kv-pool ragged"
        )

    _get_key_buffer = _no_token_access
    _get_value_buffer = _no_token_access
    get_key_buffer = _no_token_access
    get_value_buffer = _no_token_access
    get_kv_buffer = _no_token_access
    get_kv_buffer_shape = _no_token_access
    get_raw_kv_buffer = _no_token_access
    set_kv_buffer = _no_token_access
    set_kv_buffer_prefix_valid = _no_token_access
    get_cpu_copy = _no_token_access
    load_cpu_copy = _no_token_access
    get_contiguous_buf_infos = _no_token_access
    get_device_pool_infos = _no_token_access
    host_pool_decls = _no_token_access
    get_dequant_workspace = _no_token_access
    get_flashinfer_dequant_workspace_kv_buffer = _no_token_access
    get_flashinfer_decode_dequant_workspace_kv_buffer = _no_token_access
    finalize_backing = _no_token_access


def slab_pool(pool: Any) -> Any:
    """Return the pool of slabs: the part for full attention of SGLang's hybrid pool, or the pool itself."""
    return getattr(pool, "full_kv_pool", pool)


def slab_allocator(allocator: Any) -> Any:
    """Return the allocator of slabs: what a hybrid allocator of SGLang holds, or the allocator itself."""
    return getattr(allocator, "full_attn_allocator", allocator)
