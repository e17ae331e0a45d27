"""Chains of drafts: what their tokens attend to, what they leave behind, and where they end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.attention.view import chain_view
from sgl_ragged.features.drafts import torch_verify
from sgl_ragged.features.drafts.chains import as_chains, end_at_border, require_chains
from sgl_ragged.mem_pool.slab_format import FORMATS
from tests.examples import examples
from tests.harness import KEPT, SEGMENT, Harness, Sequence

WIDTH, STEPS = 5, 14


@pytest.mark.parametrize("scorer", ["keydiff", "snapkv", "h2o", "fastkvzip"])
@examples(12)
@given(
    lengths=st.lists(st.integers(SEGMENT - 2 * WIDTH, SEGMENT + 1), min_size=1, max_size=3),
    accepted=st.lists(st.lists(st.integers(1, WIDTH), min_size=3, max_size=3), min_size=STEPS, max_size=STEPS),
    page_tokens=st.sampled_from([3, 17]),
)
def test_what_is_accepted_is_as_decoded_one_by_one(scorer, lengths, accepted, page_tokens):
    """Outputs against the dense mask; slabs bit for bit against those of another store that decoded one by one."""
    total = max(lengths) + STEPS * WIDTH + 1
    sequences = [Sequence(total, *KEPT.shape, 2, 16, scorer, seed) for seed in range(len(lengths))]
    expected = [sequence.expected(KEPT) for sequence in sequences]
    drafted = Harness(KEPT, 16, scorer, len(lengths), 4, page_tokens=page_tokens)
    drafted.extend(sequences, [0] * len(lengths), lengths)
    at = list(lengths)
    for step in accepted:
        # Not behind the border: that is where chains end.
        counts = [min(n, SEGMENT - place % SEGMENT) for n, place in zip(step, at, strict=False)]
        outputs = drafted.verify(sequences, at, WIDTH, counts)
        for output, want, place, count in zip(outputs, expected, at, counts, strict=True):
            torch.testing.assert_close(output.double(), want[place : place + count], atol=1e-4, rtol=1e-4)
        at = [place + count for place, count in zip(at, counts, strict=True)]
    drafted.store.flush_pending_seals()
    for row, (sequence, length, stop) in enumerate(zip(sequences, lengths, at, strict=True), start=1):
        single = Harness(KEPT, 16, scorer, 1, 4, page_tokens=page_tokens)
        single.extend([sequence], [0], [length])
        for place in range(length, stop):
            single.decode([sequence], [place])
        single.store.flush_pending_seals()
        for number in range(stop // SEGMENT):
            found, want = (
                harness.store.slabs[int(harness.table[own, number * SEGMENT]) // SEGMENT]
                for harness, own in ((drafted, row), (single, 1))
            )
            assert torch.equal(found, want)


@pytest.mark.parametrize("more", [{"form": FORMATS["k8v4"]}, {"dtype": torch.float8_e4m3fn}], ids=["codes", "fp8"])
def test_caches_of_codes_and_fp8_are_the_same(more):
    """Outputs of every token and the slab, against decoding one by one."""
    length, counts = SEGMENT - 7, [3, 1, 3, 5]
    sequences = [Sequence(SEGMENT + 6, *KEPT.shape, 2, 32, "keydiff", 0)]
    drafted, single = (Harness(KEPT, 32, "keydiff", 1, 4, **more) for _ in range(2))
    for harness in (drafted, single):
        harness.extend(sequences, [0], [length])
    for count in counts:
        output = drafted.verify(sequences, [length], WIDTH, [count])[0]
        want = torch.cat([single.decode(sequences, [length + place]) for place in range(count)])
        torch.testing.assert_close(output, want, atol=1e-4, rtol=1e-3)
        length += count
    slot = int(drafted.table[1, 0]) // SEGMENT
    assert torch.equal(drafted.store.slabs[slot].view(torch.uint8), single.store.slabs[slot].view(torch.uint8))


def test_a_view_of_chains_ends_at_borders():
    """The first chain has room, the second two tokens, the third begins a segment; nothing is sealed."""
    table = (torch.arange(4 * 3 * SEGMENT, dtype=torch.int32) + SEGMENT).view(4, -1)
    prefixes = [10, 2 * SEGMENT - 2, SEGMENT]
    view = chain_view(table, torch.tensor([1, 2, 3]), prefixes, 4, SEGMENT)
    found = [(p.request, p.segment_index, p.first_token, p.tokens, p.offset, p.seen) for p in view.pieces]
    assert found == [(0, 0, 0, 4, 10, 0), (1, 1, 4, 2, SEGMENT - 2, 1), (2, 1, 8, 4, 0, 1)]
    assert view.open_segments.tolist() == [[0, 1, 1], [0, 1, 1]]
    assert not len(view.tail_seals)
    assert not len(view.chunk_seals)
    # Pages of seven tokens that nothing lies in yet, up to the chain's last token.
    assert view.begun(7) == [(1, 9), (2, 0)]
    assert view.begun(11) == [(0, 1), (2, 0)]


TREES = [
    # tokens, parents (-1: the root's), the longest path
    ([3, 9, 44, 9, 55], [-1, 0, 0, 1, 2], [3, 9, 9, 0, 0]),
    ([3, 44, 55, 0, 0], [-1, 0, 1, 0, 0], [3, 44, 55, 0, 0]),
    ([7, 0, 0, 0, 0], [-1, 0, 0, 0, 0], [7, 0, 0, 0, 0]),
    ([3, 5, 6, 7, 8], [-1, 0, 0, 2, 3], [3, 6, 7, 8, 0]),
    ([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3], [1, 2, 3, 4, 5]),
]


def masks(parents: list[list[int]]) -> np.ndarray:
    """int64 [requests * n * n], as SGLang's corpus says who is behind whom."""
    found = np.zeros((len(parents), len(parents[0]), len(parents[0])), np.int64)
    for mask, own in zip(found, parents, strict=True):
        for node, parent in enumerate(own):
            mask[node] = mask[parent] if parent >= 0 else 0
            mask[node, node] = 1
    return found.ravel()


def test_of_a_tree_its_longest_path_is_drafted():
    tokens = np.array([tree[0] for tree in TREES]).ravel()
    chains, mask = as_chains(tokens, masks([tree[1] for tree in TREES]), 5)
    assert chains.reshape(-1, 5).tolist() == [tree[2] for tree in TREES]
    assert (mask.reshape(-1, 5, 5) == np.tri(5)).all()
    assert (chains.dtype, mask.dtype) == (tokens.dtype, np.int64)


def linked(parents: list[list[int]], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Positions, indices, successors and siblings by the torch function."""
    requests, width = len(parents), len(parents[0])
    positions = torch.zeros(requests * width, dtype=torch.int64)
    found = [torch.zeros((requests, width), dtype=torch.int64) for _ in range(3)]
    mask = torch.from_numpy(masks(parents)).bool()
    torch_verify.links(mask, torch.tensor(lengths), positions, *found, requests, width)
    return positions, *found


def test_links_of_trees():
    positions, indices, following, siblings = linked([tree[1] for tree in TREES], [10, 20, 30, 40, 50])
    assert positions.view(-1, 5).tolist()[:2] == [[10, 11, 11, 12, 12], [20, 21, 22, 21, 21]]
    assert indices.tolist()[1] == [5, 6, 7, 8, 9]
    assert following.tolist() == [
        [1, 3, 4, -1, -1],
        [1, 2, -1, -1, -1],
        [1, -1, -1, -1, -1],
        [1, -1, 3, 4, -1],
        [1, 2, 3, 4, -1],
    ]
    assert siblings.tolist()[0] == [-1, 2, -1, -1, -1]
    assert siblings.tolist()[2] == [-1, 2, 3, 4, -1]


CHAIN = [-1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("length", "right", "accepted"),
    [(10, 4, 5), (10, 2, 3), (10, 0, 1), (64 - 3, 4, 3), (64 - 3, 1, 2), (63, 4, 1), (64, 4, 5), (64 - 5, 4, 5)],
)
def test_no_token_behind_a_border_is_accepted(length, right, accepted):
    """However many drafts are right; the token behind the last accepted one is the model's."""
    _, indices, following, siblings = linked([CHAIN, CHAIN], [10, length])
    end_at_border(following, torch.tensor([10, length]), 64)
    drafts = torch.tensor([[20, 21, 22, 23, 24]] * 2)
    target = drafts + 1
    target[1, right:] = 99
    predicts = torch.zeros(10, dtype=torch.int32)
    accept_index, count = torch.full((2, 5), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    torch_verify.verify_greedily(predicts, accept_index, count, drafts, indices, following, siblings, target)
    assert (count + 1).tolist() == [5, accepted]
    assert accept_index[1].tolist() == [5 + i if i < accepted else -1 for i in range(5)]
    assert predicts[5 : 5 + accepted].tolist() == target[1, :accepted].tolist()


def test_what_is_sampled_has_the_models_distribution():
    """Of the first token, whether a draft was accepted or not; and of the second where the first was accepted."""
    requests, vocabulary = 6000, 5
    chances = [[0.1, 0.2, 0.4, 0.25, 0.05], [0.3, 0.1, 0.1, 0.2, 0.3], [0.2] * 5]
    probs = torch.tensor([chances]).expand(requests, -1, -1)
    _, indices, following, siblings = linked([[-1, 0, 1]] * requests, [0] * requests)
    drafts = torch.tensor([[0, 2, 3]]).expand(requests, -1)
    predicts = torch.full((requests * 3,), -1, dtype=torch.int32)
    accept_index, count = torch.full((requests, 3), -1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    coins = torch.rand(requests, 4, generator=torch.Generator().manual_seed(1))
    torch_verify.verify_by_sampling(
        *(predicts, accept_index, count, drafts, indices, following, siblings),
        *(coins[:, :3], coins[:, 3], probs, torch.zeros_like(probs)),
    )
    found = predicts.view(requests, 3)
    for place, which in ((0, slice(None)), (1, count >= 1)):
        shares = np.bincount(found[which, place].numpy(), minlength=vocabulary) / len(found[which])
        np.testing.assert_allclose(shares, probs[0, place].numpy(), atol=0.03)
    assert (count == 2).float().mean() == pytest.approx(float(probs[0, 0, 2] * probs[0, 1, 3]), abs=0.03)


def test_what_top_k_and_top_p_leave():
    probs = torch.tensor([[0.4, 0.1, 0.3, 0.2]] * 2)
    k = torch_verify.top_k_renormalised(probs, torch.tensor([1, 3]))
    torch.testing.assert_close(k, torch.tensor([[1, 0, 0, 0], [4 / 9, 0, 3 / 9, 2 / 9]]))
    p = torch_verify.top_p_renormalised(probs, torch.tensor([0.3, 0.75]))
    torch.testing.assert_close(p, torch.tensor([[1, 0, 0, 0], [4 / 9, 0, 3 / 9, 2 / 9]]))


def test_links_of_a_draft_model_are_those_of_chains():
    lengths, width = [10, 20, 63], 5
    chains = [[-1, 0, 1, 2, 3]] * 3
    found = [torch.zeros(3 * width, dtype=torch.int64), *torch.zeros((3, 3, width), dtype=torch.int64)]
    mask = torch.ones(3 * width * width, dtype=torch.bool)
    scores = torch.arange(width - 1).repeat(3, 1)
    shape = (1, width - 1, width, 0)
    torch_verify.links_of_chains(scores[:, :-1], scores, torch.tensor(lengths, dtype=torch.int32), mask, *found, *shape)
    for have, want in zip(found, linked(chains, lengths), strict=True):
        assert torch.equal(have, want)


def test_a_draft_model_goes_on_with_its_best_token():
    best, certain = torch.tensor([[7], [9]]), torch.ones(2, 1)
    tokens, hidden, scores, drawn = torch_verify.next_of_chain(1, certain, best, None, None, 1)
    assert (tokens.tolist(), hidden, scores.tolist()) == ([7, 9], None, [[1], [1]])
    assert torch.equal(drawn[1], best)


def test_where_a_draft_model_writes_and_what_it_goes_on_with():
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    locations = torch.zeros(6, dtype=torch.int64)
    torch_verify.chain_locations(torch.tensor([1, 0]), table, torch.tensor([3, 5]), locations, 1, 3)
    assert locations.tolist() == [23, 24, 25, 5, 6, 7]
    last = torch.zeros(2, dtype=torch.int32)
    torch_verify.last_accepted(torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([1, 3], dtype=torch.int32), last, 3, 2)
    assert last.tolist() == [4, 9]


def test_where_accepted_tokens_lie():
    locations = torch.tensor([100, 101, 102, 7, 8, 9])
    front, accepted = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    torch_verify.fill_front(torch.tensor([2, 1]), locations, front)
    torch_verify.fill_accepted(torch.tensor([[0, 1, -1], [3, -1, -1]]), locations, accepted, 6)
    assert front.tolist() == accepted.tolist() == [100, 101, 7, 0, 0, 0]
    require_chains(front, accepted)
    with pytest.raises(RuntimeError, match="no chain"):
        require_chains(front, front.roll(1))
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    more = dict(batch_size=2, draft_token_num=2, device="cpu")
    rows = torch.tensor([1, 0])
    found = torch_verify.extend_locations(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=torch.tensor([3, 5]),
        end_offset=torch.tensor([5, 7]),
        **more,
    )
    assert found.tolist() == [23, 24, 5, 6]
    torch_verify.write_locations(rows, table, torch.tensor([0, 19]), torch.tensor([2, 20]), torch.tensor([9, 8, 7]), 2)
    assert (table[1, :2].tolist(), int(table[0, 19])) == ([9, 8], 7)
