"""The contract has every function that is wrapped or overridden; docs/sglang-seams.md lists those that are wrapped."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace

import sgl_ragged
from sgl_ragged import sglang_contract
from sgl_ragged.contract_checks import resolve
from sgl_ragged.serve.feature import serve_features
from sgl_ragged.serve.hooks import CONTROLLER_HOOKS, HOOKS, KV_BYTES_HOOKS, RANKS_HOOKS
from sgl_ragged.serve.worker import configurator_class

PAGE = Path(__file__).parents[2] / "docs" / "sglang-seams.md"
GROUPS = [group for group in vars(sglang_contract).values() if isinstance(group, dict) and group]


def wrapped() -> list[str]:
    of_features = [hook for feature in serve_features() for hook in feature.hooks]
    hooks = [*HOOKS, *RANKS_HOOKS, *KV_BYTES_HOOKS, *CONTROLLER_HOOKS, *of_features]
    of_class = [
        f"{sglang_contract.CONFIGURATOR}.{name}"
        for name, value in vars(configurator_class(SimpleNamespace(from_command_line=True))).items()
        if isinstance(value, FunctionType)
    ]
    return [
        *(hook.target for hook in hooks),
        *(sglang_contract.DEAD_WORKER, sglang_contract.ADAPTER_ID),
        *of_class,
    ]


def test_the_page_lists_every_wrapped_function():
    named = PAGE.read_text().replace("`DataParallelController.", "`").split("`")[1::2]
    missing = {target for target in wrapped() if target.rpartition(".")[2] not in named}
    assert missing == set()


def test_the_contract_has_every_wrapped_function():
    functions = {target for group in GROUPS for target in group if target.startswith("sglang.")}
    assert set(wrapped()) <= functions


def overridden() -> Iterator[str]:
    """Methods of SGLang that classes of ours override, by dotted path, but for those that only refuse."""
    for module in pkgutil.walk_packages(sgl_ragged.__path__, "sgl_ragged."):
        for owner in vars(importlib.import_module(module.name)).values():
            if not isinstance(owner, type) or owner.__module__ != module.name:
                continue
            for name, method in vars(owner).items():
                if inspect.isfunction(method) and method.__name__ == name:
                    bases = (base for base in owner.__mro__[1:] if name in vars(base))
                    base = next(bases, object)
                    if base.__module__.startswith("sglang."):
                        yield f"{base.__module__}.{base.__qualname__}.{name}"


def test_the_contract_has_every_overridden_method():
    functions = [resolve(target) for group in GROUPS for target in group if target.startswith("sglang.")]
    found = set(overridden())
    assert len(found) > 40
    assert {target for target in found if resolve(target) not in functions} == set()
