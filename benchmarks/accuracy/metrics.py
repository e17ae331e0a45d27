"""How an answer is scored: text of an answer and its reference in, a share in [0, 1] out.

Definitions: RULER (arXiv 2404.06654, NVIDIA/RULER, scripts/eval/synthetic/constants.py) and SCBench (arXiv 2412.10319,
microsoft/MInference, scbench/compute_scores.py). Nothing is rounded here; SCBench rounds `vt` to two decimals.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from benchmarks.accuracy.packages import imported

LETTERS = "ABCD"
_PHRASES = ("answer is:", "answer:", "answer is", "option is")
"""What the letter of a choice follows, in the order in which they are looked for."""

_BLANKED = str.maketrans(dict.fromkeys("\r\n\"'.,?!{}", " "))
_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"[0-9]+\.[0-9]+|[0-9]+")
_DIGITS = re.compile(r"[0-9]+")
_PUNCTUATION = frozenset(string.punctuation)


def printable(prediction: str) -> str:
    """The answer as RULER matches it: stripped, control characters made line breaks."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def contains_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references, at least one, that occur in the answer, whatever their case."""
    lowered = prediction.lower()
    return sum(reference.lower() in lowered for reference in references) / len(references)


def contains_any(prediction: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the answer, whatever its case."""
    lowered = prediction.lower()
    return float(any(reference.lower() in lowered for reference in references))


def contains(prediction: str, reference: str) -> float:
    """1 if the reference occurs in the answer exactly as it is."""
    return float(reference in prediction)


def first_number(prediction: str, reference: int | float) -> float:
    """1 if the first number of the answer is the reference. An integer is compared without the answer's decimals."""
    found = _NUMBER.search(prediction)
    if found is None:
        return 0.0
    number = float(found.group())
    return float((int(number) if isinstance(reference, int) else number) == reference)


def first_integer(prediction: str, reference: str) -> float:
    """1 if the first run of digits in the answer is the reference, digit by digit."""
    found = _DIGITS.search(prediction)
    return float(found is not None and found.group() == reference)


def chosen_letter(prediction: str, letter: str, option: str) -> float:
    """1 if the answer chooses the option with this text and this letter of A to D.

    A leading letter decides, even as the first letter of a word; then the whole answer, then what follows a phrase
    such as "answer is", then the first word that is a letter.
    """
    stripped = prediction.strip()
    if not stripped:
        return 0.0
    if stripped[0] in LETTERS:
        return float(stripped[0] == letter)
    if stripped == option:
        return 1.0
    words = stripped.translate(_BLANKED).split()
    cleaned = " ".join(words)
    for phrase in _PHRASES:
        _, found, rest = cleaned.partition(phrase)
        if found:
            return float(rest.removeprefix(" ").startswith((letter, option)))
    chosen = next((word for word in words if len(word) == 1 and word in LETTERS), None)
    return float(chosen == letter)


def f1_chinese(prediction: str, references: Sequence[str]) -> float:
    """F1 of the characters that answer and reference share, each as often as both have it; of the best reference.

    Case, white space and punctuation (ASCII, full-width and all that Unicode calls so) do not count.
    """
    answer = _characters(prediction)
    return max(_f1(answer, _characters(reference)) for reference in references)


def _characters(text: str) -> Counter[str]:
    return Counter(c for c in text.lower() if not c.isspace() and not _is_punctuation(c))


def _is_punctuation(character: str) -> bool:
    # Unicode calls some of ASCII's punctuation symbols ($, +, <); NFKC makes full-width forms ASCII.
    if unicodedata.category(character).startswith("P"):
        return True
    return unicodedata.normalize("NFKC", character) in _PUNCTUATION


def _f1(answer: Counter[str], reference: Counter[str]) -> float:
    """2 * shared / (size of both); the same as the harmonic mean of precision and recall."""
    shared = (answer & reference).total()
    return 2 * shared / (answer.total() + reference.total()) if shared else 0.0


def rouge_lsum(prediction: str, reference: str) -> float:
    """F-measure of rougeLsum without stemming; line breaks separate sentences.

    Raises:
        SuiteError: rouge-score is not installed.
    """
    scorer = imported("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"])
    return float(scorer.score(target=reference, prediction=prediction)["rougeLsum"].fmeasure)
