"""Console script `sgl-ragged`: look at a layout, and check an installation, without starting a server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sgl_ragged.budgets import profile_kept, uniform_kept
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fingerprint import config_fingerprint
from sgl_ragged.layout import SlabLayout
from sgl_ragged.mem_pool.sizing import parse_bytes, plan_pool
from sgl_ragged.profile import load_profile

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def main() -> None:
    """Entry point; ends with status 1 and one line on bad input."""
    parser = argparse.ArgumentParser(prog="sgl-ragged", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    layout = commands.add_parser("layout", help="what a KV budget holds, for a model on disk")
    layout.add_argument("--model", type=Path, required=True, help="folder with config.json")
    layout.add_argument("--kv-bytes", required=True, help="KV budget, such as 24GiB")
    layout.add_argument("--ratio", type=float, default=0.5)
    layout.add_argument("--segment", type=int, default=256)
    layout.add_argument("--profile", type=Path)
    layout.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    layout.add_argument("--max-running-requests", type=int)
    layout.add_argument("--json", action="store_true")
    layout.set_defaults(run=show_layout)
    check = commands.add_parser("check", help="whether the installed SGLang has the seams that the plugin needs")
    check.set_defaults(run=check_installation)
    options = parser.parse_args()
    try:
        options.run(options)
    except RaggedConfigError as error:
        sys.exit(f"sgl-ragged: {error}")


def show_layout(options: argparse.Namespace) -> None:
    """Print the pool plan of one rank that holds all heads."""
    config = _read_config(options.model)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    if options.profile is None:
        kept = uniform_kept(layers, heads, options.ratio, options.segment)
    else:
        profile = load_profile(options.profile)
        profile.require_model(
            fingerprint=config_fingerprint(config),
            num_layers=layers,
            num_heads=heads,
            head_dim=head_dim,
            model=str(options.model),
        )
        kept = profile_kept(profile, options.ratio, options.segment)
    layout = SlabLayout(kept=kept, head_dim=head_dim, segment=options.segment)
    budget = parse_bytes(options.kv_bytes)
    plan = plan_pool(layout, DTYPE_BYTES[options.dtype], budget, options.max_running_requests)
    if not options.json:
        print(plan.describe())
        return
    names = ("slab_bytes", "num_slots", "max_total_tokens", "tails_bytes", "max_requests", "total_bytes", "full_tokens")
    print(json.dumps({name: getattr(plan, name) for name in names} | {"kept": kept.tolist()}))


def check_installation(_: argparse.Namespace) -> None:
    """Print one line if every seam is as expected, raise RaggedConfigError with the list of those that are not."""
    from sgl_ragged.plugin.seams import RAGGED_SEAMS, check_seams

    check_seams(RAGGED_SEAMS)
    print(f"all {len(RAGGED_SEAMS)} seams of the installed SGLang are as expected")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RaggedConfigError(f"cannot read {path}: {error}") from None
    return config.get("text_config", config)


if __name__ == "__main__":
    main()
