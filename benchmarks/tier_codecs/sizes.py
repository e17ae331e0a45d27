"""Bytes of a row of the host tier by codec: arithmetic on kept counts, no server.

python -m benchmarks.tier_codecs.sizes [PROFILE.safetensors ...] [--ratio 0.5 0.3] [--segment 256] [--itemsize 2]

Without profiles, those that come with the package. Each stands beside equal budgets of the same model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.harness.rows import Rows
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.codecs import CODECS
from sgl_ragged.features.host_tier.layer_pairs import Shareable
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.profiles.budgets import uniform_kept
from sgl_ragged.profiles.profile import load_profile, profile_kept
from sgl_ragged.profiles.profile_choice import BUNDLED_FOLDER

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def row(name: str, layout: SlabLayout, dtype: torch.dtype) -> tuple[str, ...]:
    """What each codec stores, as a share of the slab, and what pairs of layers could share.

    The last two: the share of pairs of layers in which no heads keep equally many tokens, and the mean share of the
    second layer's bytes that need not be stored.
    """
    slab, cells = layout.slab_bytes(dtype.itemsize), []
    for codec in CODECS.values():
        try:
            cells.append(f"{codec(layout, dtype).row_bytes / slab:.3f}")
        except RaggedConfigError:
            cells.append("refused")
    places = np.triu_indices(layout.num_layers, 1)
    saved = Shareable(layout).elems[places] / layout.layer_elems[places[1]]
    return name, *cells, f"{(saved == 0).mean():.2f}", f"{saved.mean():.2f}"


def layouts(paths: list[Path], ratios: list[float], segment: int) -> Iterator[tuple[str, SlabLayout]]:
    """Each profile at each ratio, and equal budgets for each model once."""
    seen = set()
    for path in paths:
        profile = load_profile(path)
        for ratio in ratios:
            kept = profile_kept(profile, ratio, segment)
            yield f"{path.stem}, {ratio:g}", SlabLayout(kept, profile.head_dim, segment)
            if (kept.shape, ratio) not in seen:
                seen.add((kept.shape, ratio))
                equal = uniform_kept(*kept.shape, ratio, segment)
                name = f"equal budgets, {kept.shape[0]} layers of {kept.shape[1]} heads, {ratio:g}"
                yield name, SlabLayout(equal, profile.head_dim, segment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", type=Path, default=sorted(BUNDLED_FOLDER.glob("*.safetensors")))
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.3])
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--itemsize", type=int, choices=DTYPES, default=2, help="bytes of an element of the cache [2]")
    options = parser.parse_args()
    try:
        rows = tuple(
            row(name, layout, DTYPES[options.itemsize])
            for name, layout in layouts(options.profiles, options.ratio, options.segment)
        )
    except RaggedConfigError as error:
        sys.exit(f"tier_codecs.sizes: {error}")
    columns = ("profile, ratio", *CODECS, "pairs with none equal", "of the second layer, shareable")
    Rows("Bytes of a row to those of its slab", columns, rows).show(Console())


if __name__ == "__main__":
    main()
