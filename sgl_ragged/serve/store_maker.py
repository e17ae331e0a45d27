"""Make the slab store of a rank, and a small one like it for the check of kernels at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sgl_ragged.attention.kernel_choice import make_sealer
from sgl_ragged.fitting.fitted import StoreFit, without_codebook
from sgl_ragged.mem_pool.kv_dtype import is_fp8
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.open_pages import OpenPages
from sgl_ragged.mem_pool.slab_store import SlabStore, open_pages
from sgl_ragged.scorers import get_scorer


@dataclass(frozen=True)
class StoreMaker:
    """Settings that all stores of a rank share; arguments as in `SlabStore`.

    statistics: per layer, tensors [heads, ...] by name, the codebook's among them. kernel: as in `make_sealer`.
    """

    layout: SlabLayout
    scorer: str
    kernel: str
    dtype: torch.dtype
    query_dtype: torch.dtype
    device: str
    q_per_kv: int
    statistics: Sequence[Mapping[str, torch.Tensor]]
    softmax_scales: Sequence[float]

    def make(self, num_slots: int, num_rows: int, pages: OpenPages) -> SlabStore:
        """Make a store with all layers."""
        fit = StoreFit.from_statistics(self.layout, self.statistics, self.softmax_scales, fp8=is_fp8(self.dtype))
        return SlabStore(
            self.layout,
            get_scorer(self.scorer),
            num_slots,
            num_rows,
            self.dtype,
            self.device,
            q_per_kv=self.q_per_kv,
            statistics=without_codebook(self.statistics),
            pages=pages,
            query_dtype=self.query_dtype,
            softmax_scales=self.softmax_scales,
            sealer=make_sealer(self.kernel, self.layout, self.device),
            corrector=fit,
        )

    def make_small(self, layers: Sequence[int], requests: int, segments: int) -> SlabStore:
        """Make a store of some layers, for `attention.self_check`."""
        part = replace(
            self,
            layout=self.layout.some_layers(layers),
            statistics=[self.statistics[layer] for layer in layers],
            softmax_scales=[self.softmax_scales[layer] for layer in layers],
        )
        pages = open_pages(get_scorer(self.scorer), [part.layout], self.q_per_kv, self.dtype, self.query_dtype)
        return part.make(1 + requests * (segments + 2 * pages.most), requests + 2, pages)
