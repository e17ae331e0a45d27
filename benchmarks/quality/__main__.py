"""What the ragged pool costs a real model, beside SGLang's token pool, along one axis.

    python -m benchmarks real_model --output models/smollm2-135m
    python -m benchmarks quality --model models/smollm2-135m [--scorer gate keydiff] [--ratio 0.5 0.3 0.2]
    python -m benchmarks quality --axis history --model models/smollm2-135m
    python -m benchmarks quality --axis retrieval --model models/smollm2-135m --profile gate.safetensors

Axes: how much is kept (compression), how far back requests see (history), what is fetched back (retrieval). All
servers read the same texts; what the output file holds already is not measured again. Writes JSON, prints
tables. Each axis has options of its own: --axis history --help.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.command import command
from benchmarks.harness.options import chosen, new_parser
from benchmarks.quality import compression, history
from benchmarks.quality.retrieval import axis as retrieval

AXES = {"compression": compression, "history": history, "retrieval": retrieval}
"""Modules with DEFAULTS of the options that they share, `add_options` of their own, and `run`."""

DEFAULT = "compression"


def parser(axis: str = DEFAULT) -> argparse.ArgumentParser:
    """Options of an axis."""
    own = AXES[axis]
    made = new_parser("quality", __doc__)
    made.add_argument("--axis", choices=tuple(AXES), default=DEFAULT, help=f"[{DEFAULT}]")
    made.add_argument("--model", required=True, help="folder of a Hugging Face model")
    made.add_argument("--segment", type=int, help="tokens [%(default)s]")
    made.add_argument("--kv-bytes", help="KV budget of every server [%(default)s]")
    made.add_argument("--output", type=Path, metavar="FILE.json", help="[%(default)s]")
    made.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    own.add_options(made.add_argument_group(f"--axis {axis}", own.__doc__))
    made.set_defaults(**own.DEFAULTS)
    return made


def main() -> None:
    axis = chosen("--axis", DEFAULT)
    options = parser(axis if axis in AXES else DEFAULT).parse_args()
    with command("quality"):
        AXES[options.axis].run(options)


if __name__ == "__main__":
    main()
