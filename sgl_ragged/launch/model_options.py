"""Options that say which model is served with which budgets, shared by `sgl-ragged layout` and benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.models import load_model_config, model_geometry, refuse_model
from sgl_ragged.launch.multimodal import refuse_positions
from sgl_ragged.launch.plan import BudgetChoice, choose_budgets, kept_share
from sgl_ragged.mem_pool.slab_format import WIDE, WIDE_RATIO, Share
from sgl_ragged.profiles.budgets import check_segment
from sgl_ragged.profiles.fingerprint import text_config
from sgl_ragged.profiles.geometry import ModelGeometry
from sgl_ragged.profiles.profile_choice import BUNDLED, named_profile

T = TypeVar("T")


def add_model_options(parser: argparse.ArgumentParser, ratio: float | None = WIDE_RATIO) -> None:
    """Add --model and the server's flags for its budgets; `ratio`: the default."""
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--ratio", type=float, default=ratio)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--scorer", default="keydiff")
    parser.add_argument("--profile", default=BUNDLED, metavar="bundled|uniform|FILE")


def read_model(options: argparse.Namespace) -> Any:
    """Return SGLang's ModelConfig of the model; the import takes seconds.

    Raises:
        RaggedConfigError: the model does not exist, or the server refuses it.
    """
    check_segment(options.segment)
    model_config = load_model_config(options.model)
    refuse_model(model_config)
    refuse_positions(model_config.hf_text_config, options.scorer)
    return model_config


def read_geometry(options: argparse.Namespace) -> ModelGeometry:
    """Return the model's geometry as the server reads it; raises as `read_model` does."""
    return model_geometry(read_model(options))


def choose_kept(
    options: argparse.Namespace, geometry: ModelGeometry, share: Share | None = None, itemsize: int = 2
) -> BudgetChoice:
    """Return budgets for slabs of a cache of `itemsize` bytes per element; wide slabs unless `share` is given.

    Raises:
        RaggedConfigError: budgets that do not fit the model.
    """
    share = Share(options.ratio, WIDE) if share is None else share
    tokens = kept_share(geometry, share.ratio, options.segment, share.form, itemsize)
    profile = named_profile(options.profile, geometry, options.scorer)
    return choose_budgets(geometry, profile=profile, scorer=options.scorer, ratio=tokens, segment=options.segment)


def read_sizes(folder: Path, make: Callable[[Mapping[str, Any]], T]) -> T:
    """Call `make` with the text model's part of the folder's config.json.

    Raises:
        RaggedConfigError: the file does not exist, or lacks a key.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        return make(text_config(config))
    except (OSError, json.JSONDecodeError) as error:
        raise RaggedConfigError(f"cannot read {path}: {error}") from None
    except KeyError as error:
        raise RaggedConfigError(f"{path} is no model configuration, it lacks {error}") from None
