"""Random lives of requests whose drafts are accepted or not, on SGLang's own allocation for drafts within our hooks.

What is checked after each step is as without drafts: rejected ones leave nothing, pages are in one place each.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.speculative import eagle_utils

from sgl_ragged.attention.operations import commit
from sgl_ragged.mem_pool.open_segments import OpenChains
from tests.open_machine import ROWS, SEGMENT, OpenMachine
from tests.pool_machine import LAYOUT, VOCABULARY, kv

WIDTH = 7


class ChainMachine(OpenMachine):
    ahead = 0
    """Tokens that requests may have more than SGLang says when pages are allocated (`OpenChains`)."""

    def __init__(self) -> None:
        super().__init__()
        self._use(WIDTH)
        self.accepting = np.random.default_rng(0)
        self.last: dict[str, int] = {}
        self.flight: dict[str, list[int]] = {}

    def _use(self, width: int) -> None:
        """Chains of this width."""
        self.width = width
        seal = functools.partial(commit, self.store, self.table.req_to_token)
        self.open.chains = OpenChains(self.open, width, seal, width if self.ahead else 0)

    @rule(seed=st.integers(0, 99))
    def draft_otherwise(self, seed: int) -> None:
        """Which drafts are accepted from now on."""
        self.accepting = np.random.default_rng(seed)

    def _has_room(self) -> bool:
        new = sum(self._segments(req) * SEGMENT - req.kv.kv_allocated_len for req in self.running)
        new = -(-new // SEGMENT) * SEGMENT + SEGMENT * len(self.running)
        return self.allocator.check_decode_capacity(num_tokens=new, tree_cache=self.tree, requests=self.running)

    def _segments(self, req: Req) -> int:
        """That SGLang allocates pages for."""
        return -(-(req.kv.kv_committed_len + 2 * self.width) // SEGMENT)

    def _decode_step(self) -> None:
        """A step with a chain for each request: its last token, then drafts, of which the first few are right."""
        self._launch()
        self._process(self.flight)

    def _launch(self) -> dict[str, list[int]]:
        """What is accepted is in `flight` then. Gives what was there: tokens that SGLang has not been told of."""
        self._prepare()
        return self._compute([(req, req.kv.req_pool_idx) for req in self.running])

    def _prepare(self) -> None:
        """SGLang's allocation, by what it knows."""
        known = torch.tensor([req.kv.kv_committed_len for req in self.running])
        batch = self._batch(
            self.running,
            seq_lens=known,
            seq_lens_cpu=known,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in self.running]),
            sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        )
        eagle_utils.eagle_prepare_for_decode(batch)

    def _compute(self, reqs: list[tuple[Req, int]]) -> dict[str, list[int]]:
        """A chain for each of these requests, with their rows, be they ended."""
        rows = torch.tensor([row for _, row in reqs])
        tokens = [[*self.tokens(req), *self.flight.get(req.rid, ())] for req, _ in reqs]
        # The last one is what comes next.
        lengths = [len(one) - 1 for one in tokens]
        self.open.chains.begin(rows, rows.tolist(), lengths)
        self._describe()
        described = self.operations.describe_chains(
            self.table.req_to_token, rows, torch.tensor(lengths), lengths, self.width
        )
        content, accepted = [], {}
        for (req, _), own, length in zip(reqs, tokens, lengths, strict=True):
            count = min(int(self.accepting.integers(1, self.width + 1)), SEGMENT - length % SEGMENT)
            drafts = self.accepting.integers(0, VOCABULARY, self.width - 1).tolist()
            content.append(kv([own[-1], *drafts], length))
            if req in self.running:
                accepted[req.rid] = [*drafts[: count - 1], int(self.accepting.integers(VOCABULARY))]
        every = torch.cat(content)
        for layer in range(LAYOUT.num_layers):
            keys, values = every[:, layer, 0], every[:, layer, 1]
            self.operations.extend(layer, keys[:, :, None], keys, values, described, keys)
        before, self.flight = self.flight, accepted
        return before

    def _process(self, found: dict[str, list[int]]) -> None:
        """Tell requests what has been accepted, as SGLang does."""
        for req in self.running:
            tokens = found.get(req.rid, [])
            req.output_ids.extend(tokens)
            req.kv.kv_committed_len += len(tokens)
            if tokens:
                self.last[req.rid] = len(tokens)
        if found is self.flight:
            self.flight = {}

    def _step(self, rng: np.random.Generator) -> None:
        """What comes next is among what is accepted."""
        self._decode_step()

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

    def _sealed(self, req: Req) -> int:
        """One that a chain has filled is sealed with the next step."""
        number = self.open.chains._number.get(req.kv.req_pool_idx)
        return super()._sealed(req) if number is None else number

    def _held(self, req: Req) -> int:
        """Those of the last chain until its segment is sealed, whatever of it was accepted."""
        committed, last = req.kv.kv_committed_len, self.last.get(req.rid)
        if last is None:
            return self.open.pages.extra(committed % SEGMENT)
        begun = (committed - last) % SEGMENT + self.width
        return self.open.pages.most if begun >= SEGMENT else self.open.pages.extra(begun)

    @invariant()
    def pages_are_put_aside_for_who_runs(self) -> None:
        rows = {req.kv.req_pool_idx for req in self.running}
        assert {row for row, count in self.open.chains._spare.items() if count} <= rows

    @invariant()
    def what_lies_behind_a_border_is_sealed_in_the_next_step(self) -> None:
        """And no earlier: nobody knows whether it is."""
        for req in self.running:
            number = self.open.chains._number.get(req.kv.req_pool_idx)
            if number is not None:
                begun = req.kv.kv_committed_len - self.last.get(req.rid, 0)
                assert number == begun // SEGMENT


class OverlappedMachine(ChainMachine):
    """The same with overlapped batches: a step is on its way when what the one before accepted is processed."""

    ahead = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Req] = []

    def _prefilled(self, req: Req) -> None:
        self.late.append(req)

    def _decode_step(self) -> None:
        before = self._launch()
        self._process(before)

    def _process(self, found: dict[str, list[int]]) -> None:
        late, self.late = self.late, []
        for req in late:
            if req in self.running:
                checkpoint_kv_cache(req, self.tree)
        super()._process(found)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS), back=st.integers(0, WIDTH), late=st.booleans(), cut=st.integers(0, WIDTH))
    def finish(self, which: int, back: int = 0, late: bool = True, cut: int = 0) -> None:
        """late: with a step on its way; else nothing runs behind this one. cut: tokens of the last chain that a grammar
        takes back, which are not committed then."""
        rid = self.running[which % len(self.running)].rid
        found = self._launch() if late and self._has_room() else self.flight
        found[rid] = found.get(rid, [])[: max(len(found.get(rid, [])) - cut, 1)]
        self._process(found)
        super().finish(which, back)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS), back=st.integers(0, WIDTH))
    def finish_in_a_prepared_batch(self, which: int, back: int) -> None:
        """With grammars SGLang processes a step between preparing the next one and running it."""
        if not self._has_room():
            return
        self._prepare()
        self._process(self.flight)
        reqs = [(req, req.kv.req_pool_idx) for req in self.running]
        super().finish(which, back)
        self._compute(reqs)

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        self.flight.pop(req.rid, None)
        super()._release(req, checkpoint=checkpoint)

    def _held(self, req: Req) -> int:
        """Where a step is on its way, those of its chain."""
        if req.rid not in self.flight:
            return super()._held(req)
        begun = req.kv.kv_committed_len % SEGMENT + self.width
        return self.open.pages.most if begun >= SEGMENT else self.open.pages.extra(begun)

    @invariant()
    def what_lies_behind_a_border_is_sealed_in_the_next_step(self) -> None:
        if not self.flight:
            super().what_lies_behind_a_border_is_sealed_in_the_next_step()
        for req in self.running:
            if req.rid in self.flight:
                assert self.open.chains._number[req.kv.req_pool_idx] == req.kv.kv_committed_len // SEGMENT
