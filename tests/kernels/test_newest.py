"""The token of a decode step, which the decode kernel writes to the tail: by one CTA, and read by none."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from sgl_ragged.attention.torch_ops import TorchOps
from sgl_ragged.mem_pool.kv_dtype import movable
from tests.harness import KEPT, LARGEST, SEGMENT, Harness
from tests.kernels.operations import TRITON

MIXED = KEPT[:1]
HEADS, PER_HEAD = MIXED.shape[1], 2
PADDING = [1, 0]

thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


class Step:
    """A decode step of requests at the borders of segments and of pages, and padding; all memory holds something.

    wanted: a store with the tokens already in it, by torch. expected: what torch gives.
    """

    def __init__(self, dim: int, dtype: torch.dtype, tokens: int) -> None:
        torch.manual_seed(dim)
        self.lengths = [1, SEGMENT, SEGMENT + tokens, 2 * SEGMENT + min(tokens + 1, SEGMENT)]
        more = dict(page_tokens=tokens, dtype=dtype, kernel=TRITON)
        harness = Harness(MIXED, dim, "keydiff", len(self.lengths), 3, **more)
        self.store, self.operations = harness.store, harness.operations
        self.store.slabs.copy_(torch.randn(self.store.slabs.shape))
        lengths = torch.tensor(self.lengths + PADDING)
        rows = torch.tensor([*range(1, len(self.lengths) + 1), 0, 0])
        own = torch.float16 if dtype == torch.float16 else torch.float32
        self.queries = torch.randn(len(rows), HEADS, PER_HEAD, dim).to(own)
        # Parts of one projection. Of an FP8 cache, the largest numbers saturate.
        self.keys, self.values = (40 * torch.randn(len(rows), 2, HEADS, dim)).to(own).unbind(1)
        # Torch clears pages that are new.
        in_torch = TorchOps(copy.deepcopy(self.store))
        batch = in_torch.describe_decode(harness.table, rows, lengths, lengths)
        self.expected = in_torch.decode(0, self.queries, self.keys, self.values, batch)
        self.batch = self.operations.describe_decode(harness.table, rows, lengths, lengths)
        self.wanted = copy.deepcopy(self.store)
        self.wanted.append(0, self.batch.view.pages, self.batch.view.open_offsets, self.keys, self.values)
        view = self.batch.view
        page = view.pages.gather(1, (view.open_offsets // tokens).long()[:, None])[:, 0].long()
        # Whoever reads a row before it is written finds this.
        movable(self.store.tails.data)[page, 0, :, :, (view.open_offsets % tokens).long()] = (
            torch.tensor(torch.nan).to(dtype).view(torch.uint8).item() if dtype in LARGEST else torch.nan
        )
        self.newest = self.operations.newest(0, self.keys, self.values)

    def launch(self, last: bool) -> torch.Tensor:
        """Those CTAs alone that have a head's last part, or the others: log-sum-exps."""
        work = self.batch.work[0]
        owns = work.ctas[:, 1] == work.ctas[:, 2] - 1
        assert 0 < owns.sum() < len(owns)
        self.operations._lse.zero_()
        some = replace(work, ctas=work.ctas[owns == last])
        self.operations.attend_parts(0, self.queries, self.newest, self.batch.view, some)
        return self.operations._lse

    def same(self) -> bool:
        """Padding writes to slot 0, which belongs to nobody."""
        return torch.equal(self.store.slabs[1:].view(torch.uint8), self.wanted.slabs[1:].view(torch.uint8))


@pytest.mark.parametrize(
    ("dim", "dtype", "tokens"),
    [
        (64, torch.float32, 17),
        (96, torch.float8_e4m3fn, 9),
        (128, torch.float16, 5),
        (256, torch.float8_e5m2, 32),
        thorough(96, torch.float32, 36),
        thorough(256, torch.float32, 1),
        thorough(128, torch.float8_e4m3fn, 20),
    ],
)
def test_the_last_part_of_a_head_writes_the_token_and_none_reads_it(dim, dtype, tokens):
    step = Step(dim, dtype, tokens)
    before = step.store.slabs.clone()
    assert not step.launch(last=False).isnan().any()
    assert torch.equal(step.store.slabs.view(torch.uint8), before.view(torch.uint8))
    assert not step.launch(last=True).isnan().any()
    assert step.same()
    output = step.operations.decode(0, step.queries, step.keys, step.values, step.batch)
    tolerance = {"atol": 5e-2, "rtol": 5e-3} if dtype == torch.float16 else {"atol": 1e-4, "rtol": 1e-4}
    count = len(step.lengths)
    torch.testing.assert_close(output[:count].float(), step.expected[:count].float(), **tolerance)
    # Of no length.
    assert (output[-1] == 0).all()


def test_heads_that_others_attend_to_are_written_as_well():
    """With sealed segments, and in a request's first token, where such a head has no rows at all."""
    step = Step(16, torch.float32, 8)
    step.operations._opens[0] = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    output = step.operations.decode(0, step.queries, step.keys, step.values, step.batch)
    assert step.same()
    assert not output.isnan().any()
    assert (output[0, 1::2] == 0).all()
    other = step.operations.decode(0, step.queries, -step.keys, -step.values, step.batch)
    assert torch.equal(output[:, 1::2], other[:, 1::2])
    torch.testing.assert_close(output[:3, ::2], step.expected[:3, ::2], atol=1e-4, rtol=1e-4)
