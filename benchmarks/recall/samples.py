"""Sample documents of the recall task for calibration, one JSON object per line.

    python -m benchmarks recall.samples --count 50 > recall.jsonl

Both styles in turns: questions at the end ('needle') and over many turns ('chat'). No training or evaluation seed.
"""

import json

import numpy as np

from benchmarks.harness.options import new_parser
from benchmarks.recall import task

SEED = 2**33  # training and evaluation use smaller ones


def main() -> None:
    """Prints the samples."""
    parser = new_parser("recall.samples", __doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each document [2048]")
    options = parser.parse_args()
    for number in range(options.count):
        style = task.STYLES[number % len(task.STYLES)]
        tokens = task.document(np.random.default_rng([SEED, number]), options.length, style)
        asked = np.flatnonzero(tokens == task.TOKEN_ID[task.ASSISTANT])
        answers = [[int(place) + 1, int(place) + 3] for place in asked]  # the answer and the end of the turn
        print(json.dumps({"task": style, "input_ids": tokens.tolist(), "answers": answers}))


if __name__ == "__main__":
    main()
