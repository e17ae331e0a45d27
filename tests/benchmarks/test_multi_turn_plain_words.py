"""Random words for models that are not the recall model, on a tokenizer made here."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness.errors import SettingsError
from benchmarks.multi_turn.writers import PlainWriter


def tokenizer(words: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as large models have it, that knows `words` made-up words as single tokens."""
    letters = "abcdefghij"
    made = [f"{a}{b}{c}" for a in letters for b in letters for c in letters][:words]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 3 * words, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([" " + " ".join(made)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def test_random_words_have_the_asked_length_and_come_from_the_seed():
    known = tokenizer(400)
    writer = PlainWriter(known)
    rng = np.random.default_rng(3)
    text = writer.message(rng, writer.begin(rng), 200, facts=4, ask=True)
    assert text.answer is None
    assert 190 <= len(known.encode(text.content)) <= 201
    again = np.random.default_rng(3)
    assert writer.message(again, writer.begin(again), 200, facts=4, ask=True).content == text.content


def test_a_tokenizer_without_words_is_refused():
    with pytest.raises(SettingsError, match="too few whole words"):
        PlainWriter(tokenizer(5))
