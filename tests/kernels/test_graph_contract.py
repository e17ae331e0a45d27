"""The backend under the calls that SGLang's CUDA graph runner makes, without a GPU.

A captured graph runs the same kernels on the same addresses again. Here the description that was made for the capture
stands for the graph: a replay hands it to the operations once more, whatever the backend described since.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_ragged.attention.kernel_choice import make_operations, make_sealer
from sgl_ragged.attention.operations import commit
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.sizing import PoolSizes
from sgl_ragged.mem_pool.slab_store import SlabStore
from sgl_ragged.scorers import get_scorer
from sgl_ragged.serve.backend import RaggedAttnBackend
from sgl_ragged.serve.pool import RaggedTokenToKVPool
from tests.harness import KEPT, SEGMENT, Sequence

HEADS, PER_HEAD, DIM, SCALE, LAYERS = 4, 2, 16, 0.5, 2
LENGTHS = [SEGMENT - 2, 2 * SEGMENT + 5, 3]
# The runner pads to sizes that may exceed the rows of the request table.
CAPTURED = (6, 2, 1)


class Runner:
    """SGLang's model runner and graph runner, as far as the backend sees them. width: of chains; 0 without."""

    def __init__(self, kernel: str = "triton", width: int = 0) -> None:
        layout = SlabLayout(KEPT[:LAYERS], DIM, SEGMENT)
        sizes = PoolSizes(layout, 4, OpenPages(SEGMENT, 36), 12 + 4 * len(LENGTHS), len(LENGTHS) + 1)
        store = SlabStore(
            layout,
            get_scorer("keydiff"),
            sizes.num_slots,
            sizes.num_rows,
            torch.float32,
            "cpu",
            q_per_kv=PER_HEAD,
            pages=sizes.open_pages,
            softmax_scales=[SCALE] * LAYERS,
            sealer=make_sealer(kernel, layout, "cpu"),
        )
        pool = RaggedTokenToKVPool(sizes, store, device="cpu", layer_numbers=range(LAYERS))
        self.layers = torch.nn.ModuleList(
            [RadixAttention(HEADS * PER_HEAD, DIM, SCALE, HEADS, layer_id=layer) for layer in range(LAYERS)]
        )
        slots = torch.tensor([[3, 9, 1, 5], [7, 2, 11, 4], [6, 8, 10, 1]])
        # Of each request an extra page and a stage, now and before.
        self.tails = pool.store.tails
        self.tails.table[1:] = torch.arange(12, 12 + 4 * len(LENGTHS)).view(-1, 2, 2)
        self.table = torch.zeros(len(LENGTHS) + 1, 4 * SEGMENT, dtype=torch.int32)
        self.table[1:] = (slots[:, :, None] * SEGMENT + torch.arange(SEGMENT)).flatten(1)
        model_runner = SimpleNamespace(
            token_to_kv_pool=pool, model=self.layers, req_to_token_pool=SimpleNamespace(req_to_token=self.table)
        )
        self.backend = RaggedAttnBackend(model_runner, functools.partial(make_operations, kernel))
        largest = max(CAPTURED)
        self.rows = torch.zeros(largest, dtype=torch.int64)
        self.seq_lens = torch.zeros(largest, dtype=torch.int64)
        self.width = width
        self.inputs = torch.zeros(LAYERS, 3, largest * max(width, 1), HEADS * PER_HEAD * DIM)
        self.graphs: dict[int, object] = {}

    def view(self, size: int) -> SimpleNamespace:
        seq_lens = self.seq_lens[:size]
        return SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY if self.width else ForwardMode.DECODE,
            spec_info=SimpleNamespace(draft_token_num=self.width),
            batch_size=size,
            req_pool_indices=self.rows[:size],
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
        )

    def extend(self, sequences: list[Sequence], lengths: list[int]) -> None:
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=torch.arange(1, len(sequences) + 1),
            extend_prefix_lens_cpu=[0] * len(lengths),
            extend_seq_lens_cpu=lengths,
        )
        self.backend.init_forward_metadata(batch)
        for number, layer in enumerate(self.layers):
            q, k, v = (
                torch.cat([getattr(s, name)[:n, number] for s, n in zip(sequences, lengths, strict=True)])
                for name in "qkv"
            )
            self.backend.forward_extend(q.flatten(1), k, v, layer, batch)

    def capture(self) -> None:
        self.backend.init_cuda_graph_state(max(CAPTURED), max(CAPTURED) * max(self.width, 1))
        self.rows.zero_()
        self.seq_lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        for size in CAPTURED:
            view = self.view(size)
            self.backend.init_forward_metadata_out_graph(view, in_capture=True)
            self.backend.init_forward_metadata_in_graph(view)
            self.graphs[size] = self.backend.forward_metadata
            self._forward(size)

    def replay(self, sequences: list[Sequence], rows: list[int], positions: list[int]) -> torch.Tensor:
        """One decode step, padded to a captured size: [batch, layers, heads, q_per_kv, d]."""
        size = min(size for size in CAPTURED if size >= len(rows))
        self.rows.zero_()
        self.seq_lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        self.rows[: len(rows)] = torch.tensor(rows)
        self.seq_lens[: len(rows)] = torch.tensor(positions) + 1
        for number in range(LAYERS):
            for part, name in enumerate("qkv"):
                given = torch.stack([getattr(s, name)[p, number] for s, p in zip(sequences, positions, strict=True)])
                self.inputs[number, part, : len(rows), : given[0].numel()] = given.flatten(1)
        self.backend.init_forward_metadata_out_graph(self.view(size))
        self.backend.forward_metadata = self.graphs[size]
        output = self._forward(size)[:, : len(rows)]
        return output.transpose(0, 1).unflatten(2, (HEADS, PER_HEAD, DIM))

    def verify(
        self, sequences: list[Sequence], rows: list[int], positions: list[int], accepted: list[int]
    ) -> list[torch.Tensor]:
        """A chain behind a position of each sequence, padded to a captured size; `accepted` of its tokens are the
        sequence's own, and count. Of these, each [accepted, layers, heads, q_per_kv, d]."""
        size = min(size for size in CAPTURED if size >= len(rows))
        self.rows.zero_()
        self.seq_lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        self.rows[: len(rows)], self.seq_lens[: len(rows)] = torch.tensor(rows), torch.tensor(positions)
        self.inputs.normal_(std=3.0, generator=torch.Generator().manual_seed(sum(positions)))
        for number, (part, name) in itertools.product(range(LAYERS), enumerate("qkv")):
            for index, (s, p, count) in enumerate(zip(sequences, positions, accepted, strict=True)):
                right = getattr(s, name)[p : p + count, number].flatten(1)
                self.inputs[number, part, index * self.width :][:count, : right.shape[1]] = right
        self.backend.init_forward_metadata_out_graph(self.view(size))
        self.backend.forward_metadata = self.graphs[size]
        output = self._forward(size).transpose(0, 1).unflatten(2, (HEADS, PER_HEAD, DIM))
        ends = [position + count for position, count in zip(positions, accepted, strict=True)]
        commit(self.backend.store, self.table, torch.tensor(rows), ends)
        return [output[index * self.width :][:count] for index, count in enumerate(accepted)]

    def _forward(self, size: int) -> torch.Tensor:
        width = HEADS * DIM
        call = self.backend.forward_extend if self.width else self.backend.forward_decode
        size *= max(self.width, 1)
        return torch.stack(
            [
                call(q[:size], k[:size, :width], v[:size, :width], layer, None)
                for layer, (q, k, v) in zip(self.layers, self.inputs, strict=True)
            ]
        )


def test_replays_serve_other_requests_than_the_capture_and_seal_before_they_read():
    steps = 5
    sequences = [Sequence(n + steps, LAYERS, HEADS, PER_HEAD, DIM, "keydiff", seed) for seed, n in enumerate(LENGTHS)]
    expected = [sequence.expected(KEPT[:LAYERS]) for sequence in sequences]
    runner = Runner()
    runner.capture()
    assert not runner.backend.store.has_pending
    runner.extend(sequences, LENGTHS)
    for step in range(steps):
        # The first request fills its segment in the second step, is away in the third and comes back alone.
        rows = [[1, 2, 3], [1, 3], [2, 3], [1], [1]][step]
        positions = [{1: [0, 1, 1, 2, 3], 2: [0, 1, 1, 2, 2], 3: [0, 1, 2, 2, 2]}[row][step] for row in rows]
        positions = [LENGTHS[row - 1] + offset for row, offset in zip(rows, positions, strict=True)]
        output = runner.replay([sequences[row - 1] for row in rows], rows, positions)
        want = torch.stack([expected[row - 1][position] for row, position in zip(rows, positions, strict=True)])
        torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)


def test_replays_verify_other_chains_than_the_capture():
    """One comes to its border in the second step and begins a segment in the third; one is away, one comes later."""
    sequences = [Sequence(n + 12, LAYERS, HEADS, PER_HEAD, DIM, "keydiff", seed) for seed, n in enumerate(LENGTHS)]
    expected = [sequence.expected(KEPT[:LAYERS]) for sequence in sequences]
    runner = Runner(width=4)
    runner.capture()
    runner.extend(sequences, LENGTHS)
    at = dict(enumerate(LENGTHS, start=1))
    for step in ({1: 1, 2: 3}, {1: 1, 2: 1, 3: 4}, {1: 4}, {1: 2, 3: 1}):
        rows, accepted = list(step), list(step.values())
        positions = [at[row] for row in rows]
        if any(position % SEGMENT == 0 for position in positions):
            runner.tails.table[1] = runner.tails.table[1].flip(0)
        outputs = runner.verify([sequences[row - 1] for row in rows], rows, positions, accepted)
        for row, output, position, count in zip(rows, outputs, positions, accepted, strict=True):
            want = expected[row - 1][position : position + count]
            torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)
            at[row] += count
    assert runner.backend.store.batches > len(CAPTURED)


def test_scheduler_shared_tables_are_read_before_the_replay_only():
    """After the description, overwriting what the scheduler shares changes nothing."""
    sequence = Sequence(LENGTHS[1] + 1, LAYERS, HEADS, PER_HEAD, DIM, "keydiff", 1)
    runner = Runner()
    runner.capture()
    runner.extend([sequence], [LENGTHS[1]])
    assert runner.backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.PRE_REPLAY
    describe = runner.backend.init_forward_metadata_out_graph

    def describe_then_overwrite(view, in_capture=False):
        describe(view, in_capture)
        runner.table.fill_(10**6)
        runner.tails.table.fill_(10**6)
        runner.rows.fill_(10**6)
        runner.seq_lens.fill_(10**6)

    runner.backend.init_forward_metadata_out_graph = describe_then_overwrite
    output = runner.replay([sequence], [1], [LENGTHS[1]])
    want = sequence.expected(KEPT[:LAYERS])[LENGTHS[1] :]
    torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-4)


def test_operations_that_work_on_the_host_refuse_to_be_captured():
    with pytest.raises(RaggedConfigError, match="cannot be captured"):
        Runner("torch").capture()
