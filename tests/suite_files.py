"""Files of suites as they come, written for tests."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from benchmarks.accuracy.session import Session

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
