"""SGLang's radix cache for servers that retrieve: what was computed under an overlay is never shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache

from sgl_ragged.features.retrieval.settings import ASKING_TOKENS
from sgl_ragged.serve.pool import slab_pool
from sgl_ragged.serve.radix_cache import SlabRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sgl_ragged.features.retrieval.retriever import Retriever


class RetrievalRadixCache(SlabRadixCache):
    """Radix cache that takes a sequence up to the segment in which its first overlay was seen.

    The last tokens of a prompt are prefilled even if they are in the tree: their queries decide what is fetched. So a
    prompt from the cache sees the same overlay as one that was not there.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.retriever: Retriever = slab_pool(params.token_to_kv_pool_allocator.get_kvcache()).attached["retrieval"]

    def swa_reprefill_tail_tokens(self, req: Req | None = None) -> int:
        return ASKING_TOKENS

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        first = self.retriever.overlaid_from(req.kv.req_pool_idx)
        if first is not None:
            up_to = min(up_to, max(first // self.page_size * self.page_size, req.kv.cache_protected_len))
        super().checkpoint(req, up_to=up_to, **kwargs)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self.retriever.forget(req.kv.req_pool_idx)
        super().on_release(req, checkpointed=checkpointed)


def retrieval_cache(context: Any) -> Any:
    """Make the radix cache for SGLang's registry."""
    return create_unified_radix_cache(context, cache_class=RetrievalRadixCache)
