"""A random Llama that reads and writes single characters, for programs of which only the form of the text matters.

Every printable ASCII character is a token, so that grammars can build any JSON from them, and every answer is valid
text. The weights are random: on another pool, or another prefix, an answer differs as soon as attention does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 8192

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}{{- message['role'] | upper + ': ' + message['content'] + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}"
)
"""Prefix-stable, so that later turns find the earlier ones in the radix cache."""


def make_character_model(folder: Path, *, vocabulary: int = 0) -> Path:
    """Save the model and its tokenizer in `folder`: 2 layers, 4 KV heads of dimension 32, contexts of 8,192 tokens.

    Args:
        vocabulary: least number of token ids; those beyond the characters have no text. For clients that send ids.
    """
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=max(len(tokenizer), vocabulary),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # Ten times the usual spread: with flat attention and near ties, compressing would change nothing.
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.float32)
    # A logit of zero is never the largest: answers are characters up to their limit, or until a grammar is through.
    model.lm_head.weight.data[: len(SPECIALS)] = 0
    model.lm_head.weight.data[len(tokenizer) :] = 0
    model.save_pretrained(folder)
    return folder


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; others are <unk>."""
    # The byte-level spelling of a character (a space is one, too) is what SGLang's grammars expect of a vocabulary.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [byte_level.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *spelled))}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    characters.pre_tokenizer = byte_level
    characters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
