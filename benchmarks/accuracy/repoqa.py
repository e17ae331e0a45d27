"""SCBench's `repoqa`: was the described function repeated, and not another one of the same repository?

Definition: RepoQA (arXiv 2406.06025, evalplus/repoqa) as SCBench uses it. Comments are not removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.packages import imported

THRESHOLD = 0.8
"""The least similarity (BLEU) to the asked function that counts as right."""

_FENCE = "```"
_FUNCTIONS = {
    "python": "function_definition",
    "java": "method_declaration",
    "typescript": "function_declaration",
    "rust": "function_item",
    "cpp": "function_definition",
    "go": "function_declaration",
}
"""What each grammar calls the kind of function that RepoQA asks for; methods only where a language has nothing else."""

LANGUAGES = tuple(_FUNCTIONS)


@dataclass(frozen=True)
class Needle:
    """A function that some question about a repository asks for."""

    name: str
    code: str


def right(prediction: str, needles: Sequence[Needle], asked: str, language: str) -> float:
    """1 if, of the needles of its repository, the answer is most similar to the asked one, and similar enough.

    `asked` is a needle's name. Where several are equally similar, the asked one counts as the best.
    """
    function = answered_function(prediction, language)
    best, is_asked = max((similarity(function, needle.code), needle.name == asked) for needle in needles)
    return float(is_asked and best >= THRESHOLD)


def similarity(answer: str, reference: str) -> float:
    """Sentence BLEU over words between white space, smoothed by method 4 of Chen and Cherry (2014), in [0, 1]."""
    bleu = imported("nltk.translate.bleu_score")
    smoothing = bleu.SmoothingFunction().method4
    return float(bleu.sentence_bleu([reference.split()], answer.split(), smoothing_function=smoothing))


def answered_function(prediction: str, language: str) -> str:
    """The first function in the fenced blocks; without one the first block, without a block the whole answer."""
    blocks = list(_blocks(prediction))
    functions = (_first_function(block, language) for block in blocks)
    return next((function for function in functions if function is not None), blocks[0] if blocks else prediction)


def parser(language: str) -> Any:
    """A tree-sitter parser of one of LANGUAGES. Raises SuiteError when its packages are not installed."""
    tree_sitter, grammar = imported("tree_sitter"), imported(f"tree_sitter_{language}")
    made = grammar.language_typescript() if language == "typescript" else grammar.language()
    return tree_sitter.Parser(tree_sitter.Language(made))


def check_packages(language: str) -> None:
    """Raises SuiteError when a package that scoring needs is not installed, before anything is generated."""
    imported("nltk.translate.bleu_score")
    parser(language)


def _blocks(prediction: str) -> Iterator[str]:
    """The contents of blocks between two lines that begin with ```; one that is not closed is none."""
    block: list[str] | None = None
    for line in prediction.strip().split("\n"):
        is_fence = line.startswith(_FENCE)
        if block is None:
            block = [] if is_fence and _is_tag(line.removeprefix(_FENCE)) else None
        elif is_fence:
            yield "\n".join(block)
            block = None
        else:
            block.append(line)


def _is_tag(rest: str) -> bool:
    """Whether what follows a fence on its line is a language or nothing. Else the line is code or a sentence."""
    return len(rest.split()) <= 1 and _FENCE not in rest


def _first_function(code: str, language: str) -> str | None:
    """Text of the first function, from outside in and from top to bottom."""
    source = code.encode(errors="replace")
    waiting = [parser(language).parse(source).root_node]
    while waiting:
        node = waiting.pop()
        if node.type == _FUNCTIONS[language] and (language != "cpp" or _is_plain(node)):
            return source[node.start_byte : node.end_byte].decode()
        waiting += reversed(node.children)
    return None


def _is_plain(node: Any) -> bool:
    """Whether a C++ function has a plain name: it is no method, and returns no pointer or reference."""
    declarator = node.child_by_field_name("declarator")
    name = declarator.child_by_field_name("declarator") if declarator.type == "function_declarator" else None
    return name is not None and name.type == "identifier"
