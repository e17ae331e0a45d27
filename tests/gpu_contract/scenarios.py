"""What is run: a start of the server with some settings, and the kinds of steps that it meets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from sgl_ragged.attention.kernels import row_copy
from sgl_ragged.fairkv.exchange import LseExchange
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.fairkv.planner import plan_placement
from sgl_ragged.features.history.bound import HistoryBound
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.history.segment_scores import SegmentScores
from sgl_ragged.features.host_tier.codecs import make_codec
from sgl_ragged.features.host_tier.host_pool import RaggedHostPool
from sgl_ragged.features.host_tier.open_store import OpenStore
from sgl_ragged.features.host_tier.score_transfer import ScoreTransfer
from sgl_ragged.features.host_tier.slab_transfer import SlabTransfer
from sgl_ragged.features.retrieval.retriever import Retriever
from sgl_ragged.features.retrieval.roles import HeadRoles
from sgl_ragged.features.retrieval.settings import Retrieval
from sgl_ragged.features.retrieval.watching import Watching
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_cache import Entry
from sgl_ragged.mem_pool.slab_format import FORMATS
from tests.gpu_contract.fake_tensor import pin
from tests.gpu_contract.recording import REC
from tests.gpu_contract.server import DIM, HEADS, LAYERS, ROWS, SEGMENT, SLOTS, Server, kept_counts
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
    server = Server("gate", ratio=0.6, form=FORMATS["k8v4"])
    steps(server, name)
    replays(server, name)


def centred(name: str) -> None:
    server = Server("gate", ratio=0.4, form=FORMATS["k6v4"])
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
    server = Server("gate", ratio=0.4, form=FORMATS["k6v4"], fitted=True)
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


def drafts(name: str) -> None:
    """Chains of eight, inside segments and over a border, and a segment that an accepted token has filled."""
    server = Server("gate")
    server.verify(f"{name}: verify 8 chains", range(1, 9), [600 + 20 * row for row in range(8)], 8)
    server.verify(f"{name}: verify, at a border", [1, 2], [1023, 700], 8)
    server.verify(f"{name}: verify, seals what was accepted", [1, 2], [1024, 701], 8)
    server.verify(f"{name}: verify, behind 8,192", [3], [8200], 8)
    server.capture(name, width=8)
    server.replay(f"{name}: replay of 5 chains", range(1, 6), [700, 1020, 8260, 300, 512])
    server.replay(f"{name}: replay of 1 chain", [1], [2047])


def tier(name: str) -> None:
    """Slabs to rows of the host and back, as the host tier's controller asks for them."""
    server = Server("gate")
    store = server.pool.store
    with REC.quiet():
        row_copy.warm_up(store.slabs.device)
    for kind in ("exact", "fp8", "shared"):
        codec = make_codec(kind, store.layout, store.slabs.dtype)
        codec.watch(store)
        server.extend(f"{name}: extend, 1,024 tokens, {kind}", [1], [0], [1024])
        REC.serving = True
        for way, copy in (("kernel", row_copy.copy_rows), ("direct", None)):
            _transfers(server, SlabTransfer(codec, _host_rows(6, codec.row_bytes), copy), f"{name}: {kind}, {way}")
        REC.serving = False
    for layers in (32, 30):
        with REC.quiet():
            scores = SimpleNamespace(values=torch.zeros((SLOTS, layers), device="cuda"))
        transfer = ScoreTransfer(scores, 6, row_copy.copy_rows)
        REC.serving = True
        with REC.during(f"{name}: scores of {layers} layers"):
            transfer.back_up(*_indices(True))
            transfer.restore(*_indices(True))
        REC.serving = False
    _restored(server, f"{name}: what is loaded after all")
    _open_pages(server, f"{name}: pages of open segments")


def _host_rows(count: int, width: int) -> torch.Tensor:
    with REC.quiet():
        return pin(torch.zeros((count, width), dtype=torch.uint8))


def _indices(on_device: bool) -> tuple[torch.Tensor, torch.Tensor]:
    with REC.quiet():
        slots, pages = torch.tensor([3, 4]), torch.tensor([1, 2])
        return (slots.to("cuda"), pages.to("cuda")) if on_device else (slots, pages)


def _transfers(server: Server, transfer: SlabTransfer, name: str) -> None:
    """SGLang hands over indices on the device, but where rows are copied one by one without kernels."""
    slabs = server.pool.store.slabs
    indices = _indices("kernel" in name)
    with REC.during(f"{name}, 2 slabs out"):
        transfer.back_up(slabs, *indices)
    with REC.during(f"{name}, 2 slabs back"):
        for REC.layer in range(server.layer_count):
            transfer.restore(slabs, *indices, REC.layer)
    REC.layer = None


def _restored(server: Server, phase: str) -> None:
    """Segments that were to be computed again, and that no request reads."""
    codec = make_codec("exact", server.pool.store.layout, server.pool.store.slabs.dtype)
    host = RaggedHostPool.__new__(RaggedHostPool)
    host.scores, host._slabs = None, SlabTransfer(codec, _host_rows(6, codec.row_bytes), row_copy.copy_rows)
    REC.serving = True
    with REC.during(phase):
        host.restore_all(server.pool, [3, 4], [1, 2])
    REC.serving = False


def _open_pages(server: Server, name: str) -> None:
    """Those of one that leaves the device, and comes back."""
    store = server.pool.store
    below = OpenStore(store, _host_rows(6, store.slabs[0].nbytes), row_copy.copy_rows)
    with REC.quiet():
        slots = torch.tensor([3, 4]).to("cuda")
    REC.serving = True
    with REC.during(f"{name} out"):
        below.keep(Entry(("r1", 0), np.arange(40), slots))
        store.flush_pending_seals()
    with REC.during(f"{name} back"):
        below.restore(torch.tensor([0, 1]), slots)
        store.flush_pending_seals()
    REC.serving = False


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
        gate, keydiff, codes, centred, fitted, fp8, sinks, recency, scored, reservoir, drafts, tier, split, windows
    )
}  # fmt: skip
QUICK = ("gate", "keydiff", "codes", "recency")
"""The default path, a scorer with kernels, and what leaves no room for more in the ordinary tests."""
