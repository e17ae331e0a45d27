"""Prompts for `sgl-ragged verify`: built-in texts, and files of the user's."""

import json

import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.prompts import BUILT_IN, built_in_prompts, read_prompts


def test_built_in_texts_are_long_enough_to_be_compressed():
    texts = built_in_prompts()
    assert [one.name for one in texts] == list(BUILT_IN)
    assert all(len(one.prompt) > 6000 for one in texts)


def test_lines_are_messages_texts_or_ids(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"messages": messages}, {"prompt": "a"}, {"text": "b"}, {"input_ids": [1, 2]}, "c"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [one.prompt for one in read_prompts(path)] == [messages, "a", "b", [1, 2], "c"]
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert [one.prompt for one in read_prompts(tmp_path / "a.txt")] == ["one\ntwo\n"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ('"a"\n{"question": "b"}', "line 2 has no prompt; write an object with messages, prompt, text or input_ids"),
        ('{"messages": []}', "line 1 has no prompt"),
        ("3", "line 1 has no prompt"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, content, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(RaggedConfigError, match=reason):
        read_prompts(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RaggedConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
