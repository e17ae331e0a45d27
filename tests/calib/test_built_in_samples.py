"""Built-in samples of calibration: what they hold, and an identity that changes with them."""

from __future__ import annotations

import hashlib
import json

from calib import built_in
from calib.samples import read_samples
from sgl_ragged.profiles import built_in_samples as built_in_samples_module
from sgl_ragged.profiles.built_in_samples import CONTENT, SAMPLES, samples_identity


def test_the_identity_of_built_in_samples_changes_with_them(monkeypatch):
    """Texts of Python's release are counted by themselves."""
    body = "\n".join(f"    total += {number} * value" for number in range(12))
    function = "def step_{0}(total, value):\n    # {0}\n" + body + "\n    return total\n\n\n"
    sources = tuple("".join(function.format(10 * module + n) for n in range(10)) for module in range(10))
    monkeypatch.setattr(built_in, "_sources", lambda: sources)
    monkeypatch.setattr(built_in, "_documentation", lambda: tuple(f"Topic {n}.\n\n" * 400 for n in range(9)))
    monkeypatch.setattr(built_in, "_source_functions", built_in._source_functions.__wrapped__)
    made = json.dumps(list(built_in.built_in_samples(SAMPLES, 0)))
    assert hashlib.sha256(made.encode()).hexdigest()[:16] == CONTENT, "set CONTENT to this value"
    before = samples_identity()
    monkeypatch.setattr(built_in_samples_module, "library_sources", lambda: sources)
    assert samples_identity() != before


def test_built_in_samples_are_deterministic_and_of_several_tasks():
    first, again = (read_samples([], 12, seed) for seed in (5, 5))
    assert first == again
    assert first[:1] != read_samples([], 1, 6)
    assert {sample.task for sample in first} == {"facts", "text", "repeat", "functions", "recall", "records", "code"}
    for sample in first:
        assert 3500 < len(sample.text or " ".join(m["content"] for m in sample.messages)) < 10000
        if sample.task == "facts":
            # What is asked for was stated before.
            asked = [(i, m["content"]) for i, m in enumerate(sample.messages) if i % 2 == 0 and len(m["content"]) < 90]
            for place, question in asked:
                fact = sample.messages[place + 1]["content"].rstrip(".").split()[-1].strip('"')
                assert fact.lower() in " ".join(m["content"] for m in sample.messages[:place]).lower(), question
