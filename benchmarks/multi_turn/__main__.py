"""Conversations on several KV pools with the same KV bytes: of many clients, or such as pause and come back.

    python -m benchmarks multi_turn --shape chat --pools token,ragged@0.3 --clients 12 --rounds 8 \\
        --request-length 320 --output-length 16 --request-rate inf --kv-bytes 96MiB
    python -m benchmarks multi_turn --shape return --model models/random-51m --pools token/64,ragged@0.5,ragged@0.3

What is finished is kept in --output, and the same command continues where it was stopped. The shape `return` has
options of its own: --shape return --help. benchmarks/multi_turn/README.md says what is measured. Lengths are in tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.command import command
from benchmarks.harness.options import chosen, new_parser
from benchmarks.multi_turn import many_clients
from benchmarks.multi_turn.returning import shape as returning
from benchmarks.multi_turn.shapes import SHAPES
from benchmarks.recall import MODEL

MEASURED_BY = {**dict.fromkeys(SHAPES, many_clients), "return": returning}
"""Of shapes: modules with DEFAULTS of the options that they share, `add_options` of their own, and `run`."""

DEFAULT = "chat"


def parser(shape: str = DEFAULT) -> argparse.ArgumentParser:
    """Options of a shape."""
    own = MEASURED_BY[shape]
    made = new_parser("multi_turn", __doc__)
    made.add_argument("--shape", choices=tuple(MEASURED_BY), default=DEFAULT, help=f"[{DEFAULT}]")
    made.add_argument("--model", default=str(MODEL), help="[the recall model]")
    made.add_argument("--pools", help="the first is what others are held against [%(default)s]")
    made.add_argument("--kv-bytes", help="KV budget of every pool [%(default)s]")
    made.add_argument("--seed", type=int, help="[%(default)s]")
    made.add_argument("--output", type=Path, metavar="FILE.json", help="[multi-turn-SHAPE.json]")
    made.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    own.add_options(made)
    made.set_defaults(**own.DEFAULTS)
    return made


def main() -> None:
    shape = chosen("--shape", DEFAULT)
    options = parser(shape if shape in MEASURED_BY else DEFAULT).parse_args()
    with command("multi_turn"):
        MEASURED_BY[options.shape].run(options)


if __name__ == "__main__":
    main()
