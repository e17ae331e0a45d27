"""Files of RULER in the shapes in which they come, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy import records, ruler, scbench
from benchmarks.accuracy.session import SuiteError
from tests.suite_files import HAYSTACK, QUESTION, line, names, only, record, tasks_of, turn, write, write_parquet


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
