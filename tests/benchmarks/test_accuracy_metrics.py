"""How answers of the accuracy suites are scored, on cases small enough to be worked out by hand."""

from __future__ import annotations

import math
import re
import sys

import pytest

from benchmarks.accuracy import metrics, repoqa
from benchmarks.accuracy.packages import REMEDY
from benchmarks.accuracy.repoqa import Needle
from benchmarks.accuracy.session import SuiteError

OPTION = "in the old mill"
FUNCTIONS = {
    "python": "def add(first, second):\n    total = first + second\n    return total",
    "java": "public int add(int first, int second) {\n    int total = first + second;\n    return total;\n}",
    "typescript": "function add(first: number, second: number): number {\n    return first + second;\n}",
    "rust": "fn add(first: u8, second: u8) -> u8 {\n    let total = first + second;\n    total\n}",
    "cpp": "int add(int first, int second) {\n    int total = first + second;\n    return total;\n}",
    "go": "func add(first int, second int) int {\n    total := first + second\n    return total\n}",
}
OTHER = Needle("other", "def other(path):\n    with open(path) as file:\n        return file.read().splitlines()")


@pytest.mark.parametrize(
    ("prediction", "share"),
    [
        ("ABC and then xyz", 1.0),
        ("it is abc", 0.5),
        ("XYZABC", 1.0),
        ("neither", 0.0),
        ("", 0.0),
    ],
)
def test_all_references_count_alike_whatever_their_case(prediction, share):
    assert metrics.contains_all(prediction, ["abc", "Xyz"]) == share


@pytest.mark.parametrize(
    ("prediction", "share"), [("ABC and xyz", 1.0), ("it is abc", 1.0), ("neither", 0.0), ("", 0.0)]
)
def test_one_reference_is_enough(prediction, share):
    assert metrics.contains_any(prediction, ["abc", "Xyz"]) == share


@pytest.mark.parametrize(
    ("prediction", "share"), [('"1f-Ab".', 1.0), ("1F-AB", 0.0), ("1f-A", 0.0), ("", 0.0), ("x1f-Aby", 1.0)]
)
def test_a_label_occurs_exactly(prediction, share):
    assert metrics.contains(prediction, "1f-Ab") == share


def test_ruler_reads_control_characters_as_line_breaks():
    assert metrics.printable(" \x00one\x01two\tthree\x1f\n") == "one\ntwo\nthree"
    assert metrics.printable("\x7fa b") == "\x7fa b"
    assert metrics.printable("") == ""


@pytest.mark.parametrize(
    ("prediction", "reference", "share"),
    [
        ("The answer is 12.", 12, 1.0),
        ("12.9", 12, 1.0),
        ("013", 13, 1.0),
        ("3 or 12", 12, 0.0),
        ("12", 12.0, 1.0),
        ("12.5", 12.5, 1.0),
        ("about 12.50", 12.5, 1.0),
        ("12.9", 12.0, 0.0),
        ("x.5", 5, 1.0),
        ("twelve", 12, 0.0),
        ("", 12, 0.0),
    ],
)
def test_the_first_number_decides(prediction, reference, share):
    assert metrics.first_number(prediction, reference) == share


@pytest.mark.parametrize(
    ("prediction", "share"),
    [("it is 0412.", 1.0), ("412", 0.0), ("04123", 0.0), ("1 0412", 0.0), ("0412.7", 1.0), ("none", 0.0), ("", 0.0)],
)
def test_the_first_run_of_digits_decides(prediction, share):
    assert metrics.first_integer(prediction, "0412") == share


@pytest.mark.parametrize(
    ("prediction", "share"),
    [
        ("B", 1.0),
        (" B. in the new mill", 1.0),
        ("But no", 1.0),
        ("A", 0.0),
        ("C, not B", 0.0),
        (OPTION, 1.0),
        ("  in the old mill\n", 1.0),
        ("in the new mill", 0.0),
        ("the answer is: B", 1.0),
        ("the answer is:B", 1.0),
        ("the answer is: A, but B", 0.0),
        ('the "answer": C, or B', 0.0),
        ('the "answer": "B"', 1.0),
        ("the answer: B", 1.0),
        ("the answer is in the old mill", 1.0),
        ("the answer is\n'B'", 1.0),
        ("the answer is", 0.0),
        ("my option is B", 1.0),
        ("the option is A; answer: B", 1.0),
        ("the answer: A; answer is: B", 1.0),
        ("it must be B, or C", 1.0),
        ("it must be C, or B", 0.0),
        ("it must be (B)", 0.0),
        ("it is AB B", 1.0),
        ("i do not know", 0.0),
        ("...", 0.0),
        ("", 0.0),
        (" \n", 0.0),
    ],
)
def test_the_chosen_letter(prediction, share):
    assert metrics.chosen_letter(prediction, "B", OPTION) == share


@pytest.mark.parametrize(
    ("prediction", "references", "share"),
    [
        ("他在北京。", ["他在北京"], 1.0),
        # Shared 2 of 4 and of 2 characters: precision 1/2, recall 1.
        ("他在北京", ["北京"], 2 / 3),
        ("他在北京", ["上海", "北京", "在"], 2 / 3),
        # A character counts as often as both have it: 1 of 3 and of 2.
        ("京京京", ["京人"], 0.4),
        ("“Ａ”,《b》 ！", ["ａBc"], 0.8),  # noqa: RUF001
        ("ABC$+", [" a b\nc"], 1.0),
        ("。！", ["北京"], 0.0),  # noqa: RUF001
        ("上海", ["北京"], 0.0),
        ("", ["北京"], 0.0),
    ],
)
def test_chinese_f1(prediction, references, share):
    assert metrics.f1_chinese(prediction, references) == pytest.approx(share)


@pytest.mark.parametrize(
    ("prediction", "reference", "share"),
    [
        ("The cat sat.", "the CAT sat", 1.0),
        # Longest common subsequence: the cat (2 of 3 words, of 4 words). 2 * 2 / 7.
        ("the cat ran", "the black cat sat", 4 / 7),
        # Not stemmed.
        ("cats", "cat", 0.0),
        # Two sentences the other way round are all there; in one line only one of them is in order. 2 * 2 / 8.
        ("c d\na b", "a b\nc d", 1.0),
        ("c d a b", "a b c d", 0.5),
        ("", "a b", 0.0),
        ("\n\n", "a b", 0.0),
    ],
)
def test_rouge_lsum(prediction, reference, share):
    assert metrics.rouge_lsum(prediction, reference) == pytest.approx(share)


def fenced(code: str, tag: str = "") -> str:
    return f"Here it is:\n```{tag}\n{code}\n```\nIt adds."


@pytest.mark.parametrize("language", repoqa.LANGUAGES)
def test_the_function_is_found_in_a_block(language):
    code = FUNCTIONS[language]
    inside = f"class Sum {{\n{code}\n}}" if language == "java" else f"{code}\n"
    for answer in (fenced(inside, language), fenced(inside), fenced(f"\n\n{inside}", "c++")):
        assert repoqa.answered_function(answer, language) == code
        assert repoqa.right(answer, [OTHER, Needle("add", code)], "add", language) == 1.0
        assert repoqa.right(answer, [OTHER, Needle("add", code)], "other", language) == 0.0


@pytest.mark.parametrize(
    ("language", "before"),
    [
        (
            "cpp",
            "class Sum {\n    int get() { return 1; }\n};\nint *both() { return 0; }\nint Sum::put() { return 2; }",
        ),
        ("go", "func (s *Sum) Get() int { return 1 }"),
        ("typescript", "class Sum {\n    get() { return 1; }\n}\nconst put = () => 2;"),
    ],
)
def test_methods_are_passed_over_where_they_are_not_asked_for(language, before):
    assert repoqa.answered_function(fenced(f"{before}\n{FUNCTIONS[language]}"), language) == FUNCTIONS[language]


def test_the_outer_and_upper_function_comes_first():
    outer = "def outer():\n    def inner():\n        return 1\n    return inner"
    assert repoqa.answered_function(fenced(f"x = 1\n@cached\n{outer}\ndef later(): pass"), "python") == outer


def test_without_a_function_the_first_block_is_the_answer():
    first, second = "x = 1", "y = 2"
    assert repoqa.answered_function(f"{fenced(first)}\n{fenced(second)}", "python") == first
    assert repoqa.answered_function(f"{fenced(first)}\n{fenced(FUNCTIONS['python'])}", "python") == FUNCTIONS["python"]


@pytest.mark.parametrize("around", ["{}", "```python\n{}", "Here: ```{}```", "{}\n```", "```{}\n```\n"])
def test_without_a_closed_block_the_whole_answer_is_the_answer(around):
    answer = around.format(FUNCTIONS["python"])
    assert repoqa.answered_function(answer, "python") == answer


def test_code_within_a_line_opens_no_block():
    answer = f"```add```\nis a function:\n{fenced(FUNCTIONS['python'])}"
    assert repoqa.answered_function(answer, "python") == FUNCTIONS["python"]


def test_letters_beyond_ascii_do_not_move_the_function():
    code = 'def name():\n    return "é北\U0001f600"'
    assert repoqa.answered_function(fenced(f'x = "é北\U0001f600"\n{code}\n'), "python") == code


def test_bleu_by_hand():
    """Five words, the last one wrong: precisions 4/5, 3/4, 2/3, 1/2; their geometric mean, lengths being equal."""
    assert repoqa.similarity("a b c d x", "a b  c\nd e") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert repoqa.similarity("a b c d", "a b c d") == pytest.approx(1.0)
    # No four words in a row: method 4 takes ln(4) / (2 * 5) of one instead of none.
    assert repoqa.similarity("a b c x", "a b c d") == pytest.approx((3 / 4 * 2 / 3 * 1 / 2 * math.log(4) / 10) ** 0.25)
    assert repoqa.similarity("", "a b c d") == 0.0
    assert repoqa.similarity("x", "a b c d") == 0.0


def words(count: int, wrong: int = 0) -> str:
    return " ".join([f"w{i}" for i in range(count - wrong)] + [f"x{i}" for i in range(wrong)])


def test_a_best_match_must_be_similar_enough():
    """The last k of 40 words wrong: precisions (40 - k)/40, (39 - k)/39 and so on, all near 1 - k/40."""
    needles = [Needle("asked", words(40)), Needle("other", "nothing of it at all")]
    for wrong, share in ((0, 1.0), (6, 1.0), (9, 0.0)):
        similarity = repoqa.similarity(words(40, wrong), words(40))
        assert (similarity >= repoqa.THRESHOLD) == bool(share)
        assert repoqa.right(words(40, wrong), needles, "asked", "python") == share


def test_the_threshold_itself_is_enough(monkeypatch):
    monkeypatch.setattr(repoqa, "similarity", lambda answer, reference: float(reference))
    assert repoqa.right("", [Needle("asked", "0.8"), Needle("other", "0.7")], "asked", "python") == 1.0
    assert repoqa.right("", [Needle("asked", "0.79"), Needle("other", "0.7")], "asked", "python") == 0.0
    assert repoqa.right("", [Needle("asked", "0.8"), Needle("other", "0.9")], "asked", "python") == 0.0
    assert repoqa.right("", [Needle("asked", "0.9"), Needle("other", "0.9")], "asked", "python") == 1.0


def test_an_empty_answer_is_wrong():
    assert repoqa.right("", [OTHER], "other", "python") == 0.0
    assert repoqa.right("```\n```", [OTHER], "other", "python") == 0.0


@pytest.mark.parametrize(
    ("package", "score"),
    [
        ("rouge_score", lambda: metrics.rouge_lsum("a", "a")),
        ("nltk", lambda: repoqa.similarity("a", "a")),
        ("tree_sitter", lambda: repoqa.parser("go")),
        ("tree_sitter_go", lambda: repoqa.check_packages("go")),
    ],
)
def test_a_missing_package_names_what_to_install(monkeypatch, package, score):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SuiteError, match=rf"^{package} .*: {re.escape(REMEDY)}$"):
        score()
