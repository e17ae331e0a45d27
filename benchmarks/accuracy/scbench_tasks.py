"""The tasks of SCBench, the kinds of questions in them, and the files that hold them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy import files
from benchmarks.accuracy.session import SuiteError

PREFIX = "scbench_"
NEW_TOKENS = {
    "choice_eng": 40,
    "qa_eng": 40,
    "qa_chn": 40,
    "kv": 150,
    "kv_hard": 150,
    "kv_compressible": 150,
    "hashhop": 150,
    "prefix_suffix": 150,
    "mf": 5,
    "passkey": 15,
    "repoqa": 1024,
    "summary": 200,
    "vt": 30,
    "many_shot": 10,
}
"""New tokens of tasks that ask one kind of question, whose name is the task's."""

MIXED = {
    "summary_with_needles": {"summary": 800, "passkey": 15},
    "repoqa_and_kv": {"repoqa": 1024, "kv": 80},
}
"""New tokens of each kind in tasks that ask several; every turn names its own."""

TASKS = (*NEW_TOKENS, *MIXED)
_SPLITS = ("test", "train")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def find(data: Path) -> dict[str, tuple[Path, ...]]:
    """The files of each task, shards in order. Files whose names are not those of tasks are ignored.

    Raises:
        SuiteError: there is no such path, no file of SCBench, a shard is missing, or two folders hold the same task.
    """
    found: dict[str, list[Path]] = {}
    for path in files.candidates(data):
        task = _task(path)
        if task is not None:
            found.setdefault(task, []).append(path)
    if not found:
        names = f"{PREFIX}<task>.jsonl, {PREFIX}<task>.parquet and {PREFIX}<task>/test-00000-of-00001.parquet"
        raise SuiteError(f"{data} has no file of SCBench: looked for {names}, tasks {', '.join(TASKS)}")
    # One shard may be asked for on its own, by its path.
    return {task: tuple(paths) if data.is_file() else _one_set(task, paths) for task, paths in sorted(found.items())}


def _task(path: Path) -> str | None:
    """The task in a file's name, or in its folder's name where the file has the name of a data split."""
    if path.suffix not in (".jsonl", ".parquet"):
        return None
    shard = _SHARD.fullmatch(path.stem)
    stem = shard["stem"] if shard else path.stem
    # Not resolved: a cache of downloads links to files whose folders say nothing.
    name = path.absolute().parent.name if stem in _SPLITS else stem
    task = name.removeprefix(PREFIX)
    return task if name.startswith(PREFIX) and task in TASKS else None


def _one_set(task: str, paths: Sequence[Path]) -> tuple[Path, ...]:
    """All shards of a task. Raises SuiteError when one is missing, or when there are several sets of them."""
    # A download of the whole dataset holds the same records in both formats.
    lines = [path for path in paths if path.suffix == ".jsonl"]
    paths = lines or paths
    shards = [_SHARD.fullmatch(path.stem) for path in paths]
    sets = {(path.parent, shard and (shard["stem"], shard["count"])) for path, shard in zip(paths, shards, strict=True)}
    if len(sets) > 1 or (shards[0] is None and len(paths) > 1):
        raise SuiteError(f"{paths[0]} and {paths[-1]} both hold {task}: give a folder that has one of them")
    numbers = [int(shard["number"]) for shard in shards if shard]
    if shards[0] and numbers != list(range(int(shards[0]["count"]))):
        has = f"{len(numbers)} of {int(shards[0]['count'])} shards of {task}"
        raise SuiteError(f"{paths[0].parent} has {has}: download the rest, or give the path of one file")
    return tuple(paths)
