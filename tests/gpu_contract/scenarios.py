"""What is run: a start of the server with some settings, and the kinds of steps that it meets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sgl_ragged.attention.kernels.row_copy import copy_rows
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.history.bound import HistoryBound
from sgl_ragged.history.histories import Histories
from sgl_ragged.history.segment_scores import SegmentScores
from sgl_ragged.host_tier.codecs import make_codec
from sgl_ragged.host_tier.slab_transfer import SlabTransfer
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_format import K6V4, K8V4
from sgl_ragged.retrieval.retriever import Retriever
from sgl_ragged.retrieval.roles import HeadRoles
from sgl_ragged.retrieval.settings import Retrieval
from sgl_ragged.retrieval.sglang_watching import Watching
from tests.gpu_contract.fake_tensor import pin
from tests.gpu_contract.recording import REC
from tests.gpu_contract.server import DIM, HEADS, LAYERS, ROWS, SEGMENT, Server, kept_counts
from tests.gpu_contract.windowed import windows


def steps(server: Server, name: str) -> None:
    """Prefill of one and of several requests, chunks that end anywhere, short turns, decode over a border, replays."""
    server.extend(f"{name}: extend, 2,048 tokens", [1], [0], [2048])
    server.extend(f"{name}: extend, 1,997 tokens more", [1], [2048], [1997])
    rows = range(1, ROWS)
    server.extend(f"{name}: extend, 8 requests", rows, [256 * row for row in rows], [300] * len(rows))
    server.extend(f"{name}: extend, inside open segments", [1, 2], [556, 812], [40, 500])
    server.extend(f"{name}: extend, 60 tokens behind 8,192", [3], [8192], [60])
    at = [600, 1312, 8252, *range(2100, 2105)]
    server.decode(f"{name}: decode", rows, at)
    server.decode(f"{name}: decode, fills a segment", rows, [1024, *at[1:]])
    server.decode(f"{name}: decode, seals it", rows, [1025, *[one + 1 for one in at[1:]]])
    server.dummy(name)


def replays(server: Server, name: str) -> None:
    server.capture(name)
    rows, at = [1, 2, 3, 4, 5], [700, 900, 8260, 300, 400]
    server.replay(f"{name}: replay", rows, at)
    server.replay(f"{name}: replay, fills a segment", rows, [768, *at[1:]])
    server.replay(f"{name}: replay, seals it", rows, [769, *at[1:]])


def gate(name: str) -> None:
    server = Server("gate")
    steps(server, name)
    replays(server, name)


def keydiff(name: str) -> None:
    server = Server("keydiff")
    steps(server, name)
    replays(server, name)


def codes(name: str) -> None:
    """The default format at three tenths of the bytes."""
    server = Server("gate", ratio=0.6, form=K8V4)
    steps(server, name)
    replays(server, name)


def centred(name: str) -> None:
    server = Server("gate", ratio=0.4, form=K6V4)
    steps(server, name)


def fp8(name: str) -> None:
    server = Server("keydiff", dtype=torch.float8_e4m3fn)
    steps(server, name)
    replays(server, name)


def sinks(name: str) -> None:
    server = Server("keydiff", sinks=True)
    steps(server, name)
    replays(server, name)


def fitted(name: str) -> None:
    server = Server("gate", ratio=0.4, form=K6V4, fitted=True)
    server.extend(f"{name}: extend, 512 tokens", [1], [0], [512])
    server.extend(f"{name}: extend, inside an open segment", [2], [812], [500])
    server.decode(f"{name}: decode, fills a segment", [1], [1024])
    server.decode(f"{name}: decode, seals it", [1], [1025])


def _bounded(name: str, score: str) -> None:
    def attach(pool, table) -> None:
        bound = HistoryBound(8, score)
        weights = torch.full((LAYERS, HEADS), 1 / HEADS)
        scores = None if bound.by_age else SegmentScores(pool.store, score, weights)
        pool.attached["history"] = pool.views = Histories(bound, table, SEGMENT, scores)

    server = Server("gate", attach=attach)
    server.extend(f"{name}: extend, 1,024 tokens", [1], [0], [1024])
    for start in range(1024, 4096, 1024):
        server.extend(f"{name}: extend, 1,024 tokens at {start}", [1], [start], [1024])
    _at_border(server, f"{name}: the cache, at a border", 16)
    server.decode(f"{name}: decode, after a border", [1], [4097])
    server.decode(f"{name}: decode", [1], [4098])
    server.dummy(name)
    server.capture(name)
    server.replay(f"{name}: replay", [1], [4099])
    server.decode(f"{name}: decode, fills a segment", [1], [4096 + SEGMENT])
    _at_border(server, f"{name}: the cache, at the next border", 17)
    server.decode(f"{name}: decode, seals it", [1], [4097 + SEGMENT])


def _at_border(server: Server, phase: str, sealed: int) -> None:
    """What the cache does when a request has filled a segment, between steps."""
    with REC.during(phase):
        server.pool.views.advance(1, sealed)


def recency(name: str) -> None:
    _bounded(name, "recency")


def scored(name: str) -> None:
    _bounded(name, "value_key_norm")


def reservoir(name: str) -> None:
    watched = np.full((LAYERS, HEADS), -1)
    watched[1:, 1:4] = 0
    roles = HeadRoles(((0, 0), (2, 0)), watched)

    def attach(pool, table) -> None:
        retriever = Retriever(pool.store, Retrieval(1 << 30, 128, 2, 8, 0.5), roles, 16, table)
        pool.attached["retrieval"] = retriever
        pool.epilogues.append(Watching(retriever))

    server = Server("gate", attach=attach)
    retriever = server.pool.attached["retrieval"]

    def running(length: int) -> None:
        retriever.running = (1,)
        retriever.begin(1, length)

    running(2048)
    server.extend(f"{name}: extend, 1,024 tokens of 2,048", [1], [0], [1024])
    server.extend(f"{name}: extend, 1,024 tokens more", [1], [1024], [1024])
    for position in range(2049, 2069):
        server.decode(f"{name}: 20 steps of decode", [1], [position])
    retriever.running = ()
    server.dummy(name)
    server.capture(name)
    retriever.running = (1,)
    server.replay(f"{name}: replay", [1], [2069])


def tier(name: str) -> None:
    """Slabs to rows of the host and back, as the host tier's controller asks for them."""
    server = Server("gate")
    store = server.pool.store
    server.extend(f"{name}: extend, 1,024 tokens", [1], [0], [1024])
    for kind in ("exact", "fp8", "shared"):
        codec = make_codec(kind, store.layout, store.slabs.dtype)
        codec.watch(store)
        server.extend(f"{name}: extend, 1,024 tokens, {kind}", [1], [0], [1024])
        for way, row_copy in (("kernel", copy_rows), ("direct", None)):
            with REC.quiet():
                rows = pin(torch.zeros((6, codec.row_bytes), dtype=torch.uint8))
                slots, pages = torch.tensor([3, 4]), torch.tensor([1, 2])
                on_device = (slots.to("cuda"), pages.to("cuda")) if row_copy else (slots, pages)
            transfer = SlabTransfer(codec, rows, row_copy)
            phase = f"{name}: {kind}, {way}, 2 slabs"
            with REC.during(f"{phase} out"):
                transfer.back_up(store.slabs, *on_device)
            for what, indices in (("back", on_device), ("back, indices on the host", (slots, pages))):
                with REC.during(f"{phase} {what}"):
                    for REC.layer in range(store.layout.num_layers):
                        transfer.restore(store.slabs, *indices, REC.layer)
                REC.layer = None


def split(name: str) -> None:
    """Heads that are split over two ranks; their all-gather counts as one operation."""
    placement = plan_placement(kept_counts(0.3), 2, "split")
    layout = SlabLayout(
        placement.kept[:, 0], DIM, SEGMENT, total=_totals(placement), first=placement.first[:, 0], full_heads=HEADS // 2
    )
    with REC.quiet():
        exchange = LseExchange(placement, 0, "cuda", lambda own: own.repeat(2, 1, 1))
    server = Server("keydiff", layout=layout, epilogues=[exchange])
    steps(server, name)
    replays(server, name)


def _totals(placement: Placement) -> np.ndarray:
    """Like the rank's kept counts, what its heads keep on both ranks."""
    same = placement.heads[:, 0, :, None, None] == placement.heads[:, None]
    return (placement.kept[:, None] * same).sum(axis=(2, 3))


SCENARIOS: dict[str, Callable[[str], None]] = {
    one.__name__: one
    for one in (
        gate, keydiff, codes, centred, fitted, fp8, sinks, recency, scored, reservoir, tier, split, windows
    )
}  # fmt: skip
QUICK = ("gate", "keydiff", "codes", "recency")
"""The default path, a scorer with kernels, and what leaves no room for more in the ordinary tests."""
