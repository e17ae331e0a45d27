"""A Llama with random weights, larger than the recall model: for benchmarks in which arithmetic has to matter.

    python -m benchmarks random_model --output FOLDER [--layers 4] [--hidden 1024] [--heads 16] [--kv-heads 8]

The same options and seed give the same weights. It has the recall model's words, so that it needs no other tokenizer,
and answers with noise: use it for times and bytes, not for recall.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.command import command
from benchmarks.harness.errors import SettingsError
from benchmarks.harness.files import check_new_folder
from benchmarks.harness.options import new_parser


def build(
    folder: Path, *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, context: int, seed: int
) -> int:
    """Write the model's folder in bf16; returns its number of parameters."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from benchmarks.recall import task
    from benchmarks.recall.tokenizer import build_tokenizer

    ids = {f"{name}_token_id": task.TOKEN_ID[f"<{name}>"] for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=len(task.VOCABULARY),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(context).save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    parser = new_parser("random_model", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--layers", type=int, default=4, help="[4]")
    parser.add_argument("--hidden", type=int, default=1024, help="[1024]")
    parser.add_argument("--heads", type=int, default=16, help="query heads [16]")
    parser.add_argument("--kv-heads", type=int, default=8, help="[8]")
    parser.add_argument("--head-dim", type=int, default=64, help="[64]")
    parser.add_argument("--context", type=int, default=32768, help="tokens [32768]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    options = parser.parse_args()
    with command("random_model"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Check the options, write the model and say so. Raises SettingsError."""
    sizes = {name: value for name, value in vars(options).items() if name not in ("output", "seed")}
    if min(sizes.values()) < 1 or options.heads % options.kv_heads:
        raise SettingsError("sizes must be at least 1, and --heads a multiple of --kv-heads")
    check_new_folder(options.output)
    parameters = build(options.output, **sizes, seed=options.seed)
    print(f"{options.output}: {parameters / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
