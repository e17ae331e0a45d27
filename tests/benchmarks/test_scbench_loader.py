"""Files of SCBench in the shapes in which they come, and every way in which they can be wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy import repoqa, scbench
from benchmarks.accuracy.packages import REMEDY
from benchmarks.accuracy.scbench_tasks import MIXED, NEW_TOKENS
from benchmarks.accuracy.session import Session, SuiteError
from tests.suite_files import names, only, record, turn, write, write_parquet

OPTIONS = ["the mill", "the barn", "the well", "the inn"]
REPOSITORY = {"repo": "owner/name", "lang": "go"}
ADD = "func add(first int, second int) int {\n\ttotal := first + second\n\treturn total\n}"
SUB = "func sub(first int, second int) int {\n\treturn first - second\n}"
TURNS = {
    "choice_eng": turn("the barn", options=OPTIONS),
    "qa_eng": turn("The Barn"),
    "qa_chn": turn("北京"),
    "mf": turn(12, input="Only a number. The largest number in the list is"),
    "passkey": turn("0412"),
    "repoqa": turn(ADD, name="add"),
    "summary": turn("they sell the mill"),
    "vt": turn(["AB", "CD"]),
    "many_shot": turn("(A) yes"),
}
"""A turn of each kind; other kinds have a label."""

ANSWERS = {
    "choice_eng": {"B": 1.0, "the barn": 1.0, "A": 0.0},
    "qa_eng": {"in the barn.": 1.0, "the mill": 0.0},
    "qa_chn": {"在北京": 0.8, "": 0.0},
    "mf": {"12.5": 1.0, "1": 0.0},
    "passkey": {"it is 0412": 1.0, "412": 0.0},
    "repoqa": {f"```\n{ADD}\n```": 1.0, ADD: 1.0, SUB: 0.0},
    "summary": {"they sell the mill": 1.0, "they sell the barn": 0.75},
    "vt": {"ab, x": 0.5},
    "many_shot": {"(a) YES": 1.0, "(": 0.0, "yes": 0.0},
}
LABEL = {"it is right.": 1.0, "Right": 0.0}


@pytest.mark.parametrize("kind", NEW_TOKENS)
@pytest.mark.parametrize("writing", [write, write_parquet])
def test_a_record_of_each_task(tmp_path, kind, writing):
    fields = {"context": [5, 12, 5]} if kind == "mf" else {}
    path = tmp_path / f"scbench_{kind}.{'jsonl' if writing is write else 'parquet'}"
    writing(path, [record(TURNS.get(kind, turn()), **fields, **REPOSITORY)])
    session = only(scbench.load(path, [kind], None))
    question = session.questions[0]
    assert (session.name, session.may_be_cut, len(session.questions)) == (f"{kind}/1", True, 1)
    assert session.context.endswith("[5, 12, 5]" if kind == "mf" else "The context.")
    assert (question.task, question.new_tokens) == (kind, NEW_TOKENS[kind])
    assert question.text.startswith("\n\n")
    answer = TURNS.get(kind, turn())["answer"]
    assert question.answer == ("AB, CD" if kind == "vt" else str(answer))
    for prediction, share in ANSWERS.get(kind, LABEL).items():
        assert question.score(prediction) == pytest.approx(share), prediction


def test_instructions_come_before_contexts_that_have_none(tmp_path):
    for kind in NEW_TOKENS:
        write(tmp_path / f"scbench_{kind}.jsonl", [record(TURNS.get(kind, turn()), **REPOSITORY)])
    for mixed, kinds in MIXED.items():
        turns = [TURNS.get(kind, turn()) | {"task": f"scbench_{kind}"} for kind in kinds]
        write(tmp_path / f"scbench_{mixed}.jsonl", [record(*turns, **REPOSITORY)])
    sessions = scbench.load(tmp_path, None, None)
    bare = {"vt", "many_shot", "summary", "prefix_suffix", "hashhop", *MIXED}
    assert len(sessions) == len(NEW_TOKENS) + len(MIXED)
    for session in sessions:
        instruction, _, rest = session.context.partition("\n\n")
        assert ((instruction, rest) == ("The context.", "")) == (session.name.partition("/")[0] in bare)
        assert rest in ("", "The context.")


@pytest.mark.parametrize(
    ("kind", "asked", "text"),
    [
        ("kv", "Key:", "\n\nKey:"),
        ("qa_eng", "Who?", "\n\nQuestion: Who?\nAnswer:"),
        ("qa_chn", "谁", "\n\n问题：谁\n回答："),  # noqa: RUF001
        (
            "choice_eng",
            "Where?",
            "\n\nQuestion: Where?\nA. the mill\nB. the barn\nC. the well\nD. the inn\nThe right letter is",
        ),
        ("mf", "Brief! The sum of it all is", "\n\nWhat is the sum of it all?\n\nBrief! The sum of it all is"),
        ("mf", "Sum?", "\n\nSum?"),
    ],
)
def test_questions_are_dressed(tmp_path, kind, asked, text):
    path = write(tmp_path / f"scbench_{kind}.jsonl", [record(TURNS.get(kind, turn()) | {"input": asked})])
    assert only(scbench.load(path, None, None)).questions[0].text == text


def test_records_made_from_rulers_call_the_context_input(tmp_path):
    rows = [{"index": 3, "input": "VAR AB = 1", "length": 9, "multi_turns": [turn(["AB"]), turn(["CD", "EF"])]}]
    for path in (write(tmp_path / "scbench_vt.jsonl", rows), write_parquet(tmp_path / "scbench_vt.parquet", rows)):
        session = only(scbench.load(path, None, None))
        assert session.context == "VAR AB = 1"
        assert [question.answer for question in session.questions] == ["AB", "CD, EF"]


def test_mixed_tasks_keep_their_kinds_apart(tmp_path):
    summary, passkey = (TURNS[kind] | {"task": f"scbench_{kind}"} for kind in ("summary", "passkey"))
    code, pair = TURNS["repoqa"] | {"task": "scbench_repoqa"}, turn(task="scbench_kv")
    write(tmp_path / "scbench_summary_with_needles.jsonl", [record(summary, passkey, summary)])
    write_parquet(tmp_path / "scbench_repoqa_and_kv.parquet", [record(pair, code, **REPOSITORY)])
    both = scbench.load(tmp_path, None, None)
    asked = [(question.task, question.new_tokens) for session in both for question in session.questions]
    assert asked == [
        ("repoqa_and_kv/kv", 80),
        ("repoqa_and_kv/repoqa", 1024),
        ("summary_with_needles/summary", 800),
        ("summary_with_needles/passkey", 15),
        ("summary_with_needles/summary", 800),
    ]
    answers = ["it is right", ADD, "they sell the mill", "0412", "they sell the mill"]
    questions = [question for session in both for question in session.questions]
    for question, answer in zip(questions, answers, strict=True):
        assert question.score(answer) == pytest.approx(1.0)
        assert question.score("") == 0.0


def test_needles_come_from_all_records_of_a_repository(tmp_path):
    long = ADD.replace("\treturn", "\t// The sum of both, which may be more than either.\n\treturn")
    near = long.replace("either", "one")
    assert repoqa.similarity(near, long) >= repoqa.THRESHOLD
    rows = [
        record(turn(long, name="add"), **REPOSITORY),
        record(turn(near, name="near"), **REPOSITORY),
        record(turn(SUB, name="near"), repo="other/name", lang="go"),
    ]
    path = write(tmp_path / "scbench_repoqa.jsonl", rows)
    first, second, third = (session.questions[0].score for session in scbench.load(path, None, None))
    limited = only(scbench.load(path, None, 1)).questions[0].score
    assert [score(long) for score in (first, second, third, limited)] == [1.0, 0.0, 0.0, 1.0]
    assert [score(near) for score in (first, second, third, limited)] == [0.0, 1.0, 0.0, 0.0]
    assert [score(SUB) for score in (first, second, third, limited)] == [0.0, 0.0, 1.0, 0.0]


def shard(folder: Path, number: int, count: int, *labels: str) -> Path:
    rows = [record(turn(label)) for label in labels]
    return write_parquet(folder / f"test-{number:05d}-of-{count:05d}.parquet", rows)


def answers(sessions: list[Session]) -> list[str]:
    return [question.answer for session in sessions for question in session.questions]


def test_a_download_has_a_folder_for_each_task_and_shards(tmp_path):
    shard(tmp_path / "scbench_kv", 1, 2, "c")
    shard(tmp_path / "scbench_kv", 0, 2, "a", "b")
    shard(tmp_path / "scbench_many_shot", 0, 1, "d")
    shard(tmp_path / "pictures", 0, 1, "e")
    shard(tmp_path / "kv", 0, 1, "f")
    write(tmp_path / "scbench_unheard_of.jsonl", [record(turn())])
    sessions = scbench.load(tmp_path, None, None)
    assert answers(sessions) == ["a", "b", "c", "d"]
    assert names(sessions) == ["kv/1", "kv/2", "kv/3", "many_shot/1"]
    assert answers(scbench.load(tmp_path / "scbench_kv", None, None)) == ["a", "b", "c"]
    assert answers(scbench.load(tmp_path, ["scbench_many_shot"], None)) == ["d"]
    assert answers(scbench.load(tmp_path, ["many_shot", "scbench_kv"], 1)) == ["a", "d"]
    assert answers(scbench.load(tmp_path, ["kv"], 3)) == ["a", "b", "c"]
    assert answers(scbench.load(tmp_path / "scbench_kv" / "test-00001-of-00002.parquet", None, None)) == ["c"]


def test_links_of_a_cache_are_not_followed_to_other_names(tmp_path):
    blob = shard(tmp_path / "blobs", 0, 1, "a").rename(tmp_path / "blobs" / "3f2a")
    (tmp_path / "snapshot" / "scbench_kv").mkdir(parents=True)
    (tmp_path / "snapshot" / "scbench_kv" / "test-00000-of-00001.parquet").symlink_to(blob)
    assert answers(scbench.load(tmp_path, None, None)) == ["a"]


def test_the_same_task_in_both_formats_is_loaded_once(tmp_path):
    shard(tmp_path / "scbench_kv", 0, 1, "a")
    write(tmp_path / "data" / "scbench_kv.jsonl", [record(turn("b"))])
    write(tmp_path / "data" / "v2_scbench_kv.jsonl", [record(turn("c"))])
    assert answers(scbench.load(tmp_path, None, None)) == ["b"]


def test_two_sets_of_one_task_are_refused(tmp_path):
    shard(tmp_path / "old" / "scbench_kv", 0, 1, "a")
    shard(tmp_path / "new" / "scbench_kv", 0, 1, "a")
    with pytest.raises(SuiteError, match=r"new/scbench_kv/test.* and .*old/scbench_kv/test.* both hold kv: give"):
        scbench.load(tmp_path, None, None)
    assert answers(scbench.load(tmp_path / "new", None, None)) == ["a"]


def test_shards_of_two_counts_are_two_sets(tmp_path):
    shard(tmp_path / "scbench_kv", 0, 1, "a")
    shard(tmp_path / "scbench_kv", 0, 2, "a")
    with pytest.raises(SuiteError, match=r"both hold kv"):
        scbench.load(tmp_path, None, None)


def test_a_missing_shard_is_refused(tmp_path):
    shard(tmp_path / "scbench_kv", 0, 3, "a")
    shard(tmp_path / "scbench_kv", 2, 3, "c")
    with pytest.raises(SuiteError, match=r"/scbench_kv has 2 of 3 shards of kv: download the rest, or give the path"):
        scbench.load(tmp_path, None, None)


CODE = turn(ADD, name="add")


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        ("kv", {"context": "x"}, r'line 2: "multi_turns" is missing'),
        ("kv", {"multi_turns": [turn()]}, r'line 2: "context" is missing'),
        ("kv", record(turn(), context=3), r'line 2: "context" must be a string'),
        ("kv", record(turn(), context=[1]), r'line 2: "context" must be a string'),
        ("kv", record(), r'line 2: "multi_turns" must be a list of objects'),
        ("kv", record(multi_turns={"input": "x"}), r'line 2: "multi_turns" must be a list of objects'),
        ("kv", record(multi_turns=["x"]), r'line 2: "multi_turns" must be a list of objects'),
        ("kv", record(turn(), {"answer": "x"}), r'line 2, turn 2: "input" is missing'),
        ("kv", record(turn(), {"input": "x"}), r'line 2, turn 2: "answer" is missing'),
        ("kv", record(turn(["x"])), r'line 2, turn 1: "answer" must be a string'),
        ("kv", record(turn("")), r'line 2, turn 1: "answer" must be a string'),
        ("vt", record(turn([])), r'line 2, turn 1: "answer" must be a list of strings'),
        ("vt", record(turn([1])), r'line 2, turn 1: "answer" must be a list of strings'),
        ("many_shot", record(turn(3)), r'line 2, turn 1: "answer" must be a string'),
        ("mf", record(turn("12")), r'line 2, turn 1: "answer" must be a number'),
        ("mf", record(turn(True)), r'line 2, turn 1: "answer" must be a number'),
        ("mf", record(turn(12), context=[]), r'line 2: "context" must be a list of integers'),
        ("mf", record(turn(12), context=[1, "2"]), r'line 2: "context" must be a list of integers'),
        ("passkey", record(turn(0.5)), r'line 2, turn 1: "answer" must be a string'),
        ("choice_eng", record(turn("the barn")), r'line 2, turn 1: "options" is missing'),
        ("choice_eng", record(turn("a", options=["a", "b"])), r'line 2, turn 1: "options" must be 4 strings'),
        ("choice_eng", record(turn("B", options=OPTIONS)), r'line 2, turn 1: "answer" must be one of "options"'),
        ("repoqa", record(CODE, lang="go"), r'line 2: "repo" is missing'),
        ("repoqa", record(CODE, repo="r"), r'line 2: "lang" is missing'),
        ("repoqa", record(CODE, repo="r", lang="c"), r'line 2: "lang" must be one of python, java,'),
        ("repoqa", record(turn(ADD), **REPOSITORY), r'line 2, turn 1: "name" is missing'),
        ("repoqa_and_kv", record(CODE, **REPOSITORY), r'line 2, turn 1: "task" is missing'),
        (
            "summary_with_needles",
            record(turn(task="scbench_kv")),
            r'line 2, turn 1: "task" must be one of scbench_summary, scbench_passkey',
        ),
    ],
)
def test_a_wrong_record_of_scbench(tmp_path, task, wrong, message):
    kind = next(iter(MIXED[task])) if task in MIXED else task
    good = record(TURNS.get(kind, turn()) | {"task": kind}, **REPOSITORY)
    path = write(tmp_path / f"scbench_{task}.jsonl", [good, wrong])
    with pytest.raises(SuiteError, match=rf"^{path}, {message}.*; prepare or download the file again$"):
        scbench.load(path, None, None)


def test_a_wrong_record_of_parquet_is_counted(tmp_path):
    rows = [*[record(turn())] * 20, record(turn(None))]
    path = write_parquet(tmp_path / "scbench_kv.parquet", rows)
    with pytest.raises(SuiteError, match=r'scbench_kv.parquet, record 21, turn 1: "answer" is missing; prepare'):
        scbench.load(path, None, None)


@pytest.mark.parametrize(
    ("task", "package"), [("summary", "rouge_score"), ("repoqa", "nltk"), ("repoqa", "tree_sitter_go")]
)
def test_a_missing_package_is_seen_when_loading(tmp_path, monkeypatch, task, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path / f"scbench_{task}.jsonl", [record(TURNS[task], **REPOSITORY)])
    write(tmp_path / "scbench_kv.jsonl", [record(turn())])
    with pytest.raises(SuiteError, match=rf"^{package} .*: {re.escape(REMEDY)}$"):
        scbench.load(tmp_path, None, None)
    assert len(scbench.load(tmp_path, ["kv"], None)) == 1
