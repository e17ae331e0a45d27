"""Random lives of requests whose drafts are accepted or not, on SGLang's own allocation for drafts within our hooks.

What is checked after each step is as without drafts: rejected ones leave nothing, pages are in one place each.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.speculative import eagle_utils

from sgl_ragged.drafts.sglang_chains import Chains
from tests.open_machine import ROWS, SEGMENT, OpenMachine
from tests.pool_machine import LAYOUT, VOCABULARY, kv

WIDTH = 7


class ChainMachine(OpenMachine):
    def __init__(self) -> None:
        super().__init__()
        self.open.width = WIDTH
        self.chains = Chains(SimpleNamespace(store=self.store, open_segments=self.open), self.table.req_to_token)
        self.accepting = np.random.default_rng(0)
        self.last: dict[str, int] = {}

    @rule(seed=st.integers(0, 99))
    def draft_otherwise(self, seed: int) -> None:
        """Which drafts are accepted from now on."""
        self.accepting = np.random.default_rng(seed)

    def _has_room(self) -> bool:
        new = sum(self._segments(req) * SEGMENT - req.kv.kv_allocated_len for req in self.running)
        new = -(-new // SEGMENT) * SEGMENT + SEGMENT * len(self.running)
        return self.allocator.check_decode_capacity(num_tokens=new, tree_cache=self.tree, requests=self.running)

    @staticmethod
    def _segments(req: Req) -> int:
        """That SGLang allocates pages for."""
        return -(-(req.kv.kv_committed_len + 2 * WIDTH) // SEGMENT)

    def _decode_step(self) -> None:
        """A step with a chain for each request: its last token, then drafts, of which the first few are right."""
        rows = torch.tensor([req.kv.req_pool_idx for req in self.running])
        lengths = [req.kv.kv_committed_len for req in self.running]
        batch = self._batch(
            self.running,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            req_pool_indices=rows,
            sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        )
        eagle_utils.eagle_prepare_for_decode(batch)
        self.store.batches += 1
        self.store.flush_pending_seals()
        described = self.operations.describe_chains(
            self.table.req_to_token, rows, torch.tensor(lengths), lengths, WIDTH
        )
        content, accepted = [], []
        for req, length in zip(self.running, lengths, strict=True):
            count = min(int(self.accepting.integers(1, WIDTH + 1)), SEGMENT - length % SEGMENT)
            drafts = self.accepting.integers(0, VOCABULARY, WIDTH - 1).tolist()
            content.append(kv([self.tokens(req)[length], *drafts], length))
            req.output_ids.extend(drafts[: count - 1])
            accepted.append(count)
        every = torch.cat(content)
        for layer in range(LAYOUT.num_layers):
            keys, values = every[:, layer, 0], every[:, layer, 1]
            self.operations.extend(layer, keys[:, :, None], keys, values, described, keys)
        ends = [length + count for length, count in zip(lengths, accepted, strict=True)]
        self.chains.commit(rows, rows.tolist(), ends)
        for req, count in zip(self.running, accepted, strict=True):
            req.kv.kv_committed_len += count
            self.last[req.rid] = count

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS), back=st.integers(0, WIDTH))
    def finish(self, which: int, back: int = 0, late: bool = False) -> None:
        """back: as far before the last token as one of the last chain's may have ended the answer."""
        req = self.running[which % len(self.running)]
        given = len(req.output_ids)
        back = min(back, self.last.get(req.rid, 1), given - 1)
        if back:
            req.finished_len = given - back
        self._finish(req)

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        super()._release(req, checkpoint=checkpoint)
        self.last.pop(req.rid, None)

    def _finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self._release(req, checkpoint=True)

    def _held(self, req: Req) -> int:
        """Those of the last chain until its segment is full, whatever of it was accepted."""
        committed, last = req.kv.kv_committed_len, self.last.get(req.rid)
        if committed % SEGMENT == 0 or last is None:
            return self.open.pages.extra(committed % SEGMENT)
        begun = max((committed - last) % SEGMENT + WIDTH if last <= committed % SEGMENT else 0, committed % SEGMENT)
        return self.open.pages.most if begun >= SEGMENT else self.open.pages.extra(begun)
