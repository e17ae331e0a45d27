"""What scorers keep of a picture's tokens, and of the words around them: `python -m benchmarks image_tokens --model M`.

One prefill at ratio 1 with calibration's recorder in the worker; then every head keeps the same share of each segment.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness.options import new_parser
from calib.recorder import Recorder, recording_file
from sgl_ragged.profiles.budgets import GUARD, SINKS, uniform_kept
from sgl_ragged.scorers import rank_positions

SCORERS = ("keydiff", "snapkv", "key_norm", "value_key_norm", "h2o", "tova", "streaming")
"""Those that need no calibration."""


def main() -> None:
    """Entry point; prints a table, or JSON."""
    parser = new_parser("image_tokens", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model that takes pictures")
    parser.add_argument("--picture", type=Path, help="an image file [one drawn by this program]")
    parser.add_argument("--prompt", help="with the model's own placeholder for a picture [by its chat template]")
    parser.add_argument("--scorers", nargs="+", default=list(SCORERS), metavar="NAME")
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scores, of_picture = record(options)
    rows = {name: shares(found, of_picture, options.ratio) for name, found in scores.items()}
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{int(of_picture.sum())} of {len(of_picture)} tokens are the picture's; kept in the mean over heads:")
    for name, (picture, words) in rows.items():
        print(f"{name:16} picture {picture:.3f}  words {words:.3f}")


def record(options: argparse.Namespace) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Scores [segments, layers, heads, S] by scorer, and bool [segments * S]: which tokens are the picture's."""
    from transformers import AutoProcessor

    image = _picture(options.picture)
    processor = AutoProcessor.from_pretrained(options.model)
    prompt = options.prompt or _chat(processor, "Describe this picture, with everything that is written in it. " * 8)
    tokens = processor(text=[prompt], images=[image], return_tensors="pt")["input_ids"][0]
    with tempfile.TemporaryDirectory() as folder:
        found = _prefill(options, prompt, image, Recorder(folder, tuple(options.scorers)))
    if int(found["tokens"]) != len(tokens):
        sys.exit(f"the server made {int(found['tokens'])} tokens of what the processor makes {len(tokens)} of")
    scores = {name: found[f"{name}.scores"] for name in options.scorers}
    count = next(iter(scores.values())).shape[0] * options.segment
    if count == 0:
        sys.exit(
            f"{len(tokens)} tokens fill no segment of {options.segment} that others follow; use a smaller --segment"
        )
    return scores, (tokens == processor.image_token_id)[:count]


def shares(scores: torch.Tensor, of_picture: torch.Tensor, ratio: float) -> tuple[float, float]:
    """Mean shares of a picture's tokens and of words that heads keep, sinks and guard, which all keep, left out.

    Args:
        scores: [segments, layers, heads, S]. of_picture: bool [segments * S].
    """
    segments, layers, heads, length = scores.shape
    kept = torch.from_numpy(uniform_kept(layers, heads, ratio, length)).view(-1, 1)
    first = torch.arange(segments) == 0
    order = rank_positions(scores.flatten(1, 2), first)
    chosen = (torch.arange(length) < kept).expand(order.shape)
    marked = torch.zeros_like(chosen).scatter(2, order, chosen)
    free = (torch.arange(length) < length - GUARD).expand(segments, length).clone()
    free[0, :SINKS] = False
    picture = of_picture.view(segments, length)
    mean = marked.float().mean(dim=1)
    return tuple(float(mean[free & which].mean()) for which in (picture, ~picture))  # type: ignore[return-value]


def _prefill(options: argparse.Namespace, prompt: str, image: Any, recorder: Recorder) -> dict[str, torch.Tensor]:
    import sglang

    logging.getLogger("sglang").setLevel(logging.ERROR)
    engine = sglang.Engine(
        model_path=str(options.model),
        dtype=options.dtype,
        log_level="error",
        kv_pool="ragged",
        kv_bytes="1GiB",
        ragged_ratio=1.0,
        ragged_segment=options.segment,
        ragged_profile="uniform",
        ragged_scorer="streaming",
        ragged_fairkv="none",
        ragged_observer=recorder,
        disable_radix_cache=True,
        max_running_requests=1,
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        engine.generate(prompt=prompt, image_data=_data_url(image), sampling_params=sampling)
        return load_file(recording_file(recorder.folder, 0))
    finally:
        engine.shutdown()


def _chat(processor: Any, question: str) -> str:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def _picture(path: Path | None) -> Any:
    from PIL import Image, ImageDraw

    if path is not None:
        return Image.open(path).convert("RGB")
    image = Image.linear_gradient("L").resize((448, 448)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for number in range(12):
        left, top = 149 * number % 380, 211 * number % 400
        draw.text((left, top), f"shelf {number}", fill=(255, 40 * number % 256, 0), font_size=20)
        draw.rectangle((left, top + 24, left + 60, top + 44), fill=(0, 90 * number % 256, 200))
    return image


def _data_url(image: Any) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


if __name__ == "__main__":
    main()
