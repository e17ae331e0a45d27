"""Command `quality`: measure how far servers with a profile are from the uncompressed model, by ratio."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from calib.engine import recording_kv_bytes, running_engine
from calib.plots import plot_quality, save_figure
from calib.progress import show_progress
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.model_source import read_config
from sgl_ragged.launch.models import model_geometry
from sgl_ragged.profiles.budgets import check_ratio
from sgl_ragged.profiles.profile import Profile, load_profile
from sgl_ragged.profiles.quality import MeasuredQuality, merge
from sgl_ragged.verify.distributions import distance, mean_distance
from sgl_ragged.verify.profile_reference import NO_REFERENCE, ProfileReference
from sgl_ragged.verify.server import Server

RATIOS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.05)


@dataclass(frozen=True)
class ServedModel:
    """The model that is measured, as a server would load it.

    engine_args: further arguments for SGLang's engine.
    """

    path: str
    dtype: str
    tp: int
    engine_args: Mapping[str, Any]


class EngineServer(Server):
    """SGLang's engine in this process as a server that computes each prompt anew."""

    url = "the engine"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def info(self) -> dict[str, Any]:
        return self._engine.get_server_info()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        # The engine has no radix cache, so namespaces have no effect.
        return self._engine.generate(**{name: value for name, value in body.items() if name != "extra_key"})


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a model that SGLang's engine loads."""
    add = parser.add_argument
    add("--model", required=True, help="model path, as for the server")
    add("--dtype", default="auto", help="as for the server [auto]")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, as for the server [1]")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments for SGLang's engine")


def add_parser(commands: Any) -> None:
    """Add the command to the front end."""
    parser = commands.add_parser(
        "quality",
        help="measure a profile's loss by ratio",
        description="Serves the model at each ratio and writes the distances from the profile's reference into it.",
    )
    add = parser.add_argument
    add("profile", type=Path, metavar="PROFILE", help="a profile with a reference; it is replaced")
    add("--ratios", nargs="+", type=float, default=RATIOS, metavar="R", help=f"[{' '.join(map(str, RATIOS))}]")
    add_model_flags(parser)
    add("--plot", type=Path, metavar="FILE", help="draw KL by ratio, .png or .svg")
    add("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, write the profile, and print its table.

    Raises:
        RaggedConfigError: the profile has no reference or is of another model, or a ratio cannot be served.
    """
    profile = load_profile(options.profile)
    model = ServedModel(options.model, options.dtype, options.tp, options.engine_args)
    for ratio in options.ratios:
        check_ratio(ratio)
    with show_progress() as progress:
        advance = progress.start("quality, ratios", len(options.ratios))
        profile = measure_quality(options.profile, profile, model, options.ratios, advance)
    if options.plot is not None:
        save_figure(plot_quality(profile.quality), options.plot)
    if options.json:
        print(json.dumps([asdict(row) for row in profile.quality], indent=2))
    else:
        Console().print(quality_table(profile.quality))


def measure_quality(
    path: Path, profile: Profile, model: ServedModel, ratios: Sequence[float], advance: Callable[[], None]
) -> Profile:
    """Serve the model at each ratio, and write the profile at `path` with the rows after each one.

    Args:
        advance: called once per ratio.

    Returns:
        The profile with all its rows.

    Raises:
        RaggedConfigError: the profile has no reference or is of another model, or a ratio cannot be served.
    """
    if not profile.reference:
        raise RaggedConfigError(f"profile {path} {NO_REFERENCE}")
    profile.require_model(model_geometry(read_config(model.path, model.engine_args)))
    for ratio in ratios:
        row = _measure(path, profile, model, ratio)
        profile = replace(profile, quality=merge(profile.quality, [row]))
        profile.save(path)
        advance()
    return profile


def _measure(path: Path, profile: Profile, model: ServedModel, ratio: float) -> MeasuredQuality:
    reference = ProfileReference(profile.reference, profile.segment, str(path))
    longest = max(len(text.tokens) for text in profile.reference)
    geometry = model_geometry(read_config(model.path, model.engine_args))
    arguments: dict[str, Any] = dict(
        model_path=model.path,
        dtype=model.dtype,
        tp_size=model.tp,
        kv_bytes=str(recording_kv_bytes(geometry, profile.segment, longest)),
        ragged_ratio=ratio,
        ragged_segment=profile.segment,
        ragged_profile=str(path.absolute()),
        **model.engine_args,
    )
    with running_engine(arguments) as engine:
        server = EngineServer(engine)
        server.likeliest = reference.likeliest
        facts = server.info()["ragged"]
        found = {
            prompt.name: distance(reference.read(prompt.ids, profile.segment), server.read(prompt.ids, profile.segment))
            for prompt in reference.prompts
        }
    mean = mean_distance(list(found.values()))
    return MeasuredQuality(
        ratio=ratio,
        slab_dtype=facts["slab_dtype"],
        token_share=facts["kept_ratio"],
        kl=mean.kl,
        nll=mean.nll,
        same_top1=mean.same_top1,
        kl_by_text={name: one.kl for name, one in found.items()},
    )


def quality_table(rows: Sequence[MeasuredQuality]) -> Table:
    """Return the rows as a table for a terminal."""
    texts = list(rows[0].kl_by_text) if rows else []
    table = Table(box=None, pad_edge=False)
    for name in ("ratio", "slabs", "kept", "KL", "delta NLL", "top-1", *(f"KL {name}" for name in texts)):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.token_share:.2f}", f"{row.kl:.5f}", f"{row.nll:+.4f}", f"{row.same_top1:.3f}")
        by_text = (f"{row.kl_by_text.get(name, math.nan):.4f}" for name in texts)
        table.add_row(f"{row.ratio:g}", row.slab_dtype, *numbers, *by_text)
    return table
