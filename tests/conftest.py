"""Settings for all tests; what runs in `make test-all` only; server tests in two parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.examples import load_profile

# The tensors of the unit tests are small: on shared cores more threads only wait for each other.
torch.set_num_threads(1)


LONG_SERVER_TESTS = tuple(
    f"tests/server/test_{name}.py"
    for name in ("full_ratio", "semantics", "start", "stress", "tensor_parallel", "triton_interpreted")
)
"""About half of the time of all server tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also what `make test` leaves out")


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config.getoption("thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("thorough") and not config.getoption("thorough"):
            item.add_marker(pytest.mark.skip(reason="make test-all"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Server tests in two parts: those of one part share the process that servers are forked from, and servers."""
    from xdist.scheduler import LoadScopeScheduling

    class ServersTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not nodeid.startswith("tests/server/"):
                return nodeid
            return "long servers" if nodeid.startswith(LONG_SERVER_TESTS) else "servers"

    return ServersTogether(config, log)
