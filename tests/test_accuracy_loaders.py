"""Files of RULER and SCBench in the shapes in which they come, and every way in which they can be wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.accuracy import records, repoqa, ruler, scbench
from benchmarks.accuracy.packages import REMEDY
from benchmarks.accuracy.scbench_tasks import MIXED, NEW_TOKENS
from benchmarks.accuracy.session import Session, SuiteError

HAYSTACK = "Some numbers are hidden.\nOne of the numbers for tin is 7305.\n"
QUESTION = "What are the numbers for tin? The numbers are"


def write(path: Path, lines: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def line(index: int = 0, **fields: object) -> dict:
    return {"index": index, "input": HAYSTACK + QUESTION, "outputs": ["7305"], "length": 40} | fields


def record(*turns: dict, **fields: object) -> dict:
    return {"id": 7, "context": "The context.", "multi_turns": list(turns)} | fields


def turn(answer: object = "right", **fields: object) -> dict:
    return {"input": "Which one?", "answer": answer} | fields


def names(sessions: list[Session]) -> list[str]:
    return [session.name for session in sessions]


def tasks_of(sessions: list[Session]) -> list[str]:
    return [question.task for session in sessions for question in session.questions]


def only(sessions: list[Session]) -> Session:
    (session,) = sessions
    return session


# RULER


@pytest.mark.parametrize(
    ("task", "new_tokens"),
    [
        *((f"niah_{kind}_{number}", 128) for kind in ("single", "multikey") for number in (1, 2, 3)),
        ("niah_multivalue", 128),
        ("niah_multiquery", 128),
        ("vt", 30),
        ("cwe", 120),
        ("fwe", 50),
        ("qa_1", 32),
        ("qa_2", 32),
    ],
)
def test_a_line_of_ruler_is_a_session(tmp_path, task, new_tokens):
    path = write(tmp_path / task / "validation.jsonl", [line(outputs=["7305", "x\ty"])])
    session = only(ruler.load(path, None, None))
    question = session.questions[0]
    assert (session.name, session.may_be_cut, len(session.questions)) == (f"{task}/1", False, 1)
    assert session.context == HAYSTACK.removesuffix("\n")
    assert question.text == "\n" + QUESTION
    assert (question.task, question.answer, question.new_tokens) == (task, "7305, x\ty", new_tokens)
    one, both = question.score("it is\x00 7305 "), question.score("X Y and x\ty and 7305")
    # A tab is a line break before it is matched.
    assert (one, both) == ((1.0, 1.0) if task.startswith("qa") else (0.5, 0.5))
    assert question.score("") == 0.0


@pytest.mark.parametrize(
    ("prompt", "context"),
    [
        ("A.\nB. C\nD? E", "A.\nB. C"),
        ("A.\n\nD?", "A.\n"),
        ("A. B 3.5 c. D? E", "A. B 3.5 c."),
        ("A.\nD? E\n", "A."),
        ("A.\nD? E \n\n", "A."),
        ("A. B. ", "A."),
        ("北\r\nD?\u2028E", "北\r"),
    ],
)
@pytest.mark.parametrize("prefix", [None, "", " Answer:", "\nAnswer: a. b"])
def test_context_and_question_are_the_prompt(tmp_path, prompt, context, prefix):
    path = write(tmp_path / "vt" / "validation.jsonl", [line(input=prompt, answer_prefix=prefix)])
    session = only(ruler.load(path, None, None))
    assert session.context == context
    assert session.context + session.questions[0].text == prompt + (prefix or "")


def test_ruler_folders_are_searched_and_lengths_kept_apart(tmp_path):
    for length in ("16384", "4096"):
        for task in ("vt", "niah_single_1"):
            write(tmp_path / "model" / "synthetic" / length / "data" / task / "validation.jsonl", [line(), line(1)])
    write(tmp_path / "1024" / "raw" / "qa_1" / "test.jsonl", [line()])
    write(tmp_path / "no_task" / "validation.jsonl", [line()])
    write(tmp_path / "vt" / "predictions.jsonl", [line()])
    assert names(ruler.load(tmp_path, None, None)) == [
        "qa_1/1",
        *("4096/niah_single_1/1", "4096/niah_single_1/2", "4096/vt/1", "4096/vt/2"),
        *("16384/niah_single_1/1", "16384/niah_single_1/2", "16384/vt/1", "16384/vt/2"),
    ]
    assert tasks_of(ruler.load(tmp_path, ["vt"], 1)) == ["4096/vt", "16384/vt"]
    assert tasks_of(ruler.load(tmp_path, ["qa_1", "4096/vt"], 1)) == ["qa_1", "4096/vt"]


def test_one_file_of_ruler_is_called_as_in_its_folder(tmp_path, monkeypatch):
    path = write(tmp_path / "4096" / "data" / "vt" / "validation.jsonl", [line()])
    assert tasks_of(ruler.load(path, None, None)) == ["4096/vt"]
    monkeypatch.chdir(path.parent)
    assert tasks_of(ruler.load(Path("validation.jsonl"), None, None)) == ["4096/vt"]


def test_lengths_without_names_are_not_mixed(tmp_path):
    for length in ("4096", "8192"):
        write(tmp_path / length / "vt" / "validation.jsonl", [line()])
    with pytest.raises(SuiteError, match=r"4096/vt/validation.jsonl and .*8192/vt/validation.jsonl both hold vt: give"):
        ruler.load(tmp_path, None, None)
    assert tasks_of(ruler.load(tmp_path / "8192", None, None)) == ["vt"]


def row(task: str = "vt", **fields: object) -> dict:
    made = {"context": HAYSTACK, "question": "Which is it?", "answer_prefix": "It is", "answer": ["7305", "tin"]}
    return made | {"task": task, "max_new_tokens": 30} | fields


def test_rows_as_kvpress_has_them(tmp_path):
    rows = [row("niah_single_1", max_new_tokens=128), row("qa_1"), row("niah_single_1", answer_prefix="")]
    path = write_parquet(tmp_path / "4096" / "test-00000-of-00001.parquet", rows)
    sessions = ruler.load(path, None, None)
    assert names(sessions) == ["niah_single_1/1", "niah_single_1/2", "qa_1/1"]
    assert {session.context for session in sessions} == {HAYSTACK}
    first, second, third = (session.questions[0] for session in sessions)
    assert (first.text, first.answer, first.new_tokens) == ("Which is it?\nIt is", "7305, tin", 128)
    assert (second.text, second.new_tokens) == ("Which is it?\n", 30)
    assert (first.score("7305"), first.score("TIN 7305"), third.score("Tin")) == (0.5, 1.0, 1.0)
    assert names(ruler.load(path, ["niah_single_1"], 1)) == ["niah_single_1/1"]
    with pytest.raises(SuiteError, match=r"^no task vt in this data: it holds niah_single_1, qa_1$"):
        ruler.load(path, ["vt"], None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "summary"}, r'"task" must begin with one of niah, vt'),
        ({"answer": []}, r'"answer" must be a list of strings'),
        ({"question": None}, r'"question" is missing'),
        ({"max_new_tokens": "many"}, r'"max_new_tokens" must be a number'),
    ],
)
def test_a_row_that_kvpress_does_not_have(tmp_path, fields, message):
    path = write_parquet(tmp_path / "test.parquet", [row(**fields)])
    with pytest.raises(SuiteError, match=rf"test.parquet, record 1: {message}"):
        ruler.load(path, None, None)


# What is wrong with a file, for both suites


def test_no_such_path(tmp_path):
    for suite in (ruler, scbench):
        with pytest.raises(SuiteError, match=r"/nowhere: no such file or folder$"):
            suite.load(tmp_path / "nowhere", None, None)


def test_no_file_of_the_suite(tmp_path):
    other = write(tmp_path / "other" / "other.jsonl", [line()])
    for data in (tmp_path, other):
        with pytest.raises(SuiteError, match=r"no file of RULER: looked for <task>/validation.jsonl and .* niah, vt,"):
            ruler.load(data, None, None)
        with pytest.raises(
            SuiteError, match=r"no file of SCBench: looked for scbench_<task>.jsonl, .* tasks choice_eng"
        ):
            scbench.load(data, None, None)


def test_an_unknown_task(tmp_path):
    write(tmp_path / "vt" / "validation.jsonl", [line()])
    write(tmp_path / "4096" / "data" / "qa_1" / "validation.jsonl", [line()])
    write(tmp_path / "scbench_kv.jsonl", [record(turn())])
    with pytest.raises(SuiteError, match=r"^no task cwe, 4096/vt in this data: it holds vt, 4096/qa_1$"):
        ruler.load(tmp_path, ["vt", "cwe", "4096/vt"], None)
    with pytest.raises(SuiteError, match=r"^no task vt in this data: it holds kv$"):
        scbench.load(tmp_path, ["scbench_vt"], None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r" is empty: prepare"),
        ("\n \n", r" is empty: prepare"),
        ('\n{"input": "A. B"', r", line 2: not JSON \(.*\); prepare or download the file again$"),
        ("version https://git-lfs.github.com/spec/v1\n", r", line 1: not JSON"),
        ("\xff\xfe", r", line 1: not JSON"),
        ("[1]\n", r", line 1: not a JSON object; prepare"),
    ],
)
def test_a_broken_file(tmp_path, content, message):
    for suite, name in ((ruler, "vt/validation.jsonl"), (scbench, "scbench_kv.jsonl")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="latin-1")
        with pytest.raises(SuiteError, match=f"^{path}{message}") as raised:
            suite.load(path, None, None)
        assert "\n" not in str(raised.value)


def test_a_file_that_is_no_parquet(tmp_path):
    path = tmp_path / "scbench_kv.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SuiteError, match=r"scbench_kv.parquet, after record 0: not Parquet \(.*\); prepare"):
        scbench.load(path, None, None)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(SuiteError, match=r"gone.jsonl cannot be read \(No such file or directory\): check"):
        records.read([tmp_path / "gone.jsonl"])


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_leaves_something(tmp_path, limit):
    write(tmp_path / "vt" / "validation.jsonl", [line()])
    write(tmp_path / "scbench_repoqa.jsonl", [record(turn(name="f"), repo="r", lang="go")])
    for suite in (ruler, scbench):
        with pytest.raises(SuiteError, match=r"must be at least 1$"):
            suite.load(tmp_path, None, limit)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, r'"input" is missing'),
        ({"input": 3}, r'"input" must be a string'),
        ({"input": ""}, r'"input" must be a string'),
        ({"input": "Which one?"}, r'"input" must have a text, then a question'),
        ({"input": "\nWhich one?"}, r'"input" must have a text, then a question'),
        ({"outputs": None}, r'"outputs" is missing'),
        ({"outputs": "7305"}, r'"outputs" must be a list of strings'),
        ({"outputs": []}, r'"outputs" must be a list of strings'),
        ({"outputs": [""]}, r'"outputs" must be a list of strings'),
        ({"outputs": [7305]}, r'"outputs" must be a list of strings'),
        ({"answer_prefix": 3}, r'"answer_prefix" must be a string'),
    ],
)
def test_a_wrong_line_of_ruler(tmp_path, fields, message):
    path = write(tmp_path / "vt" / "validation.jsonl", [line(), line(**fields)])
    with pytest.raises(SuiteError, match=rf"^{path}, line 2: {message}.*; prepare or download the file again$"):
        ruler.load(path, None, None)
    assert len(ruler.load(path, None, 1)) == 1


# SCBench

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
