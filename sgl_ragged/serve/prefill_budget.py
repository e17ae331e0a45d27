"""Budgets by which SGLang's scheduler admits prefill; a cut prompt goes on before new requests are admitted.

SGLang leaves a cut prompt out of a batch if its budget has no room for the next chunk, admits other requests instead,
and still counts a chunk for the prompt. Its last chunk is then taken for one in the middle, and the first token of the
answer is lost. The budgets of this module therefore

- count the pages that the next chunk takes, not an estimate of what running requests may come to need: these pages were
  reserved when the prompt was admitted, and SGLang's own pool reserves nothing there;
- admit no request while a cut prompt finds no room. The batch then has no prefill, SGLang counts no chunk, and the
  decode step that follows ends requests or retracts them;
- admit no request after one that was cut, where SGLang counts in tokens: with --disable-radix-cache, requests that
  ignore EOS. Decode within prefill leaves less than a page of the batch, and the next prompt is cut to that. The
  scheduler goes on with the request that was cut last; the one before would be decoded as if its first chunk were its
  whole prompt.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget, SWAPrefillBudget

from sgl_ragged.serve.pool import slab_allocator


class _CutPromptFirst(PrefillBudget):
    """The rules of this module, for any budget of SGLang."""

    def __init__(self, allocator: Any, tree_cache: Any, **more: Any) -> None:
        super().__init__(allocator, tree_cache, **more)
        self.slabs = slab_allocator(allocator)
        self.left_out = False
        """True if the cut prompt found no room in this pass."""
        self.cut = False
        """True if a prompt was cut in this pass."""

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        found = super().available_chunk_tokens(chunk_limit)
        self.left_out = found is None
        return found

    def fit_chunk(self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int) -> int | None:
        found = super().fit_chunk(
            extend_input_len=extend_input_len, max_new_tokens=max_new_tokens, chunk_limit=chunk_limit
        )
        if found is not None:
            # Nobody else is in the batch yet. Decode rows of a mixed batch stay out of it if they find no room.
            pages = self.slabs.next_chunk_pages(min(extend_input_len, found))
            found = found if pages * self.page_size <= self._available_and_evictable() else None
        self.left_out = found is None
        return found

    def check_prefill(self, **more: Any) -> tuple[bool, int | None]:
        return (False, None) if self.left_out else super().check_prefill(**more)

    def can_allocate_prefill(self, **more: Any) -> bool:
        return not self.left_out and not self.cut and super().can_allocate_prefill(**more)

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        # SGLang reserves no new tokens for a prompt that it cuts.
        self.cut = max_new_tokens == 0
        if is_chunked_continuation:
            # SGLang adds what `request_slot_reserve` asks for, which is 0 for a request with a row.
            extra_tokens += self.slabs.open_reserve()
        super().reserve(
            extend_input_len,
            max_new_tokens,
            extra_tokens=extra_tokens,
            chunk_limit=chunk_limit,
            is_chunked_continuation=is_chunked_continuation,
        )


class SlabBudget(_CutPromptFirst, PrefillBudget):
    """Budget of a pool of slabs."""


class HybridBudget(_CutPromptFirst, SWAPrefillBudget):
    """Budget of a pool of slabs and of pages of sliding-window layers."""
