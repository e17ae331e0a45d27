"""Krul's layer sharing as published, on whole caches: is it our estimate of attention that costs, or sharing itself?

    python -m benchmarks.tier_codecs.as_published --model models/smollm2-135m [--pairs 1 2 4 8] [--json FILE.json]

With transformers, no server, and nothing dropped: attention weights of all queries over all tokens of the conversation
choose the pairs (Algorithm 1 with the average distance over heads), the second layer of each gets the first one's keys
and values, and the text goes on. Beside it: as many pairs drawn at random, and all layers as fp8.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.files import write_whole
from benchmarks.harness.machine import describe
from benchmarks.harness.rows import Rows
from benchmarks.quality.head import Difference
from benchmarks.quality.table import mean_and_error
from benchmarks.quality.texts import pieces
from sgl_ragged.features.host_tier.fp8_codec import Fp8Codec
from sgl_ragged.features.host_tier.layer_pairs import choose_pairs, pair_candidates
from sgl_ragged.mem_pool.layout import SlabLayout

CONTEXT, CONTINUATION = 1024, 256
"""Tokens, as in benchmarks.tier_codecs."""

Pairs = list[tuple[int, int]]


def apart_and_received(attentions: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Of attention weights [1, query heads, tokens, tokens] of every layer: distances, and what tokens receive.

    Returns:
        float [layers, layers], the Euclidean distance, averaged over heads; and float [layers, tokens], averaged over
        heads and queries (Algorithm 1, lines 7 and 15).
    """
    layers, heads = len(attentions), attentions[0].shape[1]
    apart = torch.zeros(layers, layers)
    for head in range(heads):
        every = torch.stack([layer[0, head].flatten() for layer in attentions])
        products = every @ every.T
        squares = products.diagonal()
        apart += (squares[:, None] + squares[None] - 2 * products).clamp_min(0).sqrt() / heads
    received = torch.stack([layer[0].mean(dim=(0, 1)) for layer in attentions])
    return apart.double().numpy(), received.double().numpy()


def with_shared(cache: Any, pairs: Pairs) -> Any:
    """A copy in which the second layer of each pair has what the first has."""
    made = copy.deepcopy(cache)
    for first, second in pairs:
        made.layers[second].keys = made.layers[first].keys.clone()
        made.layers[second].values = made.layers[first].values.clone()
    return made


def with_fp8(cache: Any, segment: int = 256) -> Any:
    """A copy that went through the fp8 codec, segment by segment."""
    made = copy.deepcopy(cache)
    heads, tokens, dim = made.layers[0].keys.shape[1:]
    layout = SlabLayout(np.full((1, heads), segment), dim, segment)
    codec = Fp8Codec(layout, torch.float32)
    for layer in made.layers:
        # A head's keys, then its values: [segments, heads, 2, S, d].
        both = torch.stack([layer.keys[0], layer.values[0]], dim=1).unflatten(2, (tokens // segment, segment))
        slabs = both.permute(2, 0, 1, 3, 4).flatten(1)
        back = codec.decode(codec.encode(slabs, range(len(slabs))), 0, 1, torch.device("cpu"))
        back = back.unflatten(1, (heads, 2, segment, dim)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        layer.keys, layer.values = back[None, :, 0].contiguous(), back[None, :, 1].contiguous()
    return made


def difference(want: torch.Tensor, have: torch.Tensor, ids: torch.Tensor) -> Difference:
    """Of log-probabilities [tokens, vocabulary] of two runs over `ids` [tokens]."""
    want, have, following = want[:-1], have[:-1], ids[1:, None]
    return Difference(
        -have.gather(1, following)[:, 0],
        -want.gather(1, following)[:, 0],
        (want.exp() * (want - have)).sum(dim=-1),
        (want.argmax(dim=-1) == have.argmax(dim=-1)).float(),
    )


@torch.inference_mode()
def measure(
    model: Any, texts: Sequence[Sequence[int]], counts: Sequence[int], advance: Callable[[], None]
) -> dict[str, dict[str, list[float]]]:
    """Per variant: kl and delta_nll of every text's continuation."""
    found: dict[str, dict[str, list[float]]] = {}
    for number, ids in enumerate(texts):
        context, rest = torch.tensor([ids[:CONTEXT]]), torch.tensor(ids[CONTEXT : CONTEXT + CONTINUATION])
        read = model(context, use_cache=True, output_attentions=True)
        apart, received = apart_and_received(read.attentions)
        cache, layers = read.past_key_values, len(read.attentions)
        del read
        chosen, every = pair_candidates(received), np.triu(np.ones((layers, layers), dtype=bool), 1)
        rng = np.random.default_rng(number)
        variants = {"fp8": with_fp8(cache)}
        for count in counts:
            variants[f"{count} pairs"] = with_shared(cache, choose_pairs(apart, chosen, every, count))
            drawn = np.sort(rng.permutation(layers)[: 2 * count].reshape(count, 2), axis=1)
            variants[f"{count} pairs at random"] = with_shared(cache, [(int(a), int(b)) for a, b in drawn])
        want = _go_on(model, cache, rest)
        for name, changed in variants.items():
            one = difference(want, _go_on(model, changed, rest), rest)
            rows = found.setdefault(name, {"kl": [], "delta_nll": []})
            rows["kl"].append(round(float(one.kl.mean()), 7))
            rows["delta_nll"].append(round(float((one.nll - one.reference_nll).mean()), 7))
        advance()
    return found


def _go_on(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of tokens behind a cached context; the cache is as it was."""
    return model(ids[None], past_key_values=copy.deepcopy(cache), use_cache=True).logits[0].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--pairs", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    # Attention weights are what is compared: kernels do not give them out.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    texts = [text.ids for text in pieces(AutoTokenizer.from_pretrained(options.model), CONTEXT + CONTINUATION)]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("texts", total=len(texts))
        found = measure(model, texts, options.pairs, lambda: progress.advance(bar))
    layers = model.config.num_hidden_layers
    rows = []
    for name, figures in found.items():
        stored = "8 bits" if name == "fp8" else f"{1 - int(name.split()[0]) / layers:.3f} of the layers"
        cells = [f"{mean:.2g} ± {error:.1g}" for mean, error in map(mean_and_error, figures.values())]
        rows.append((name, stored, *cells))
    title = "Whole caches against the same with layers shared"
    Rows(title, ("variant", "stored", "KL", "delta NLL"), tuple(rows)).show(Console())
    if options.json is not None:
        about = {
            "command": shlex.join(["python", "-m", "benchmarks.tier_codecs.as_published", *sys.argv[1:]]),
            "machine": describe(),
        }
        write_whole(options.json, json.dumps({"about": about, "texts": len(texts), "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
