"""Options that say which model is served with which budgets, shared by `sgl-ragged layout` and benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sgl_ragged.budgets import check_ratio, check_segment
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fingerprint import text_config
from sgl_ragged.geometry import ModelGeometry
from sgl_ragged.plan import BudgetChoice, choose_budgets, kept_share
from sgl_ragged.slab_format import WIDE, SlabFormat

T = TypeVar("T")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, and what the server's flags of the same names say about its budgets."""
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--scorer", default="keydiff")
    parser.add_argument("--profile", default="auto", metavar="auto|uniform|FILE")


def choose_kept(
    options: argparse.Namespace, form: SlabFormat = WIDE, itemsize: int = 2
) -> tuple[ModelGeometry, BudgetChoice]:
    """The model and the choice of budgets, for slabs of a format beside a cache of `itemsize` bytes per element.

    The model is read as the server reads it, with SGLang's own code, which takes seconds to import.

    Raises:
        RaggedConfigError: no such model, one that the server refuses, or budgets that do not fit it.
    """
    from sgl_ragged.plugin.model_support import load_model_config, model_geometry, refuse_model
    from sgl_ragged.plugin.multimodal import refuse_positions

    check_ratio(options.ratio)
    check_segment(options.segment)
    model_config = load_model_config(options.model)
    refuse_model(model_config)
    refuse_positions(model_config.hf_text_config, options.scorer)
    geometry = model_geometry(model_config)
    share = kept_share(geometry, options.ratio, options.segment, form, itemsize)
    chosen = choose_budgets(
        geometry, profile=options.profile, scorer=options.scorer, ratio=share, segment=options.segment
    )
    return geometry, chosen


def read_sizes(folder: Path, make: Callable[[Mapping[str, Any]], T]) -> T:
    """What `make` takes from the folder's config.json of the text model.

    Raises:
        RaggedConfigError: there is no such file, or it lacks a key.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        return make(text_config(config))
    except (OSError, json.JSONDecodeError) as error:
        raise RaggedConfigError(f"cannot read {path}: {error}") from None
    except KeyError as error:
        raise RaggedConfigError(f"{path} is no model configuration, it lacks {error}") from None
