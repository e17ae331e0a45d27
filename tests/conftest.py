"""Settings for all tests; what runs in `make test-all` or `make architectures` only; how tests are shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.examples import load_profile

CLIENTS = ("tests/server/test_bench_serving.py", "tests/server/test_openai_client.py")
"""Files whose tests share one server."""

# The tensors of the unit tests are small: on shared cores more threads only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also what `make test` leaves out")
    parser.addoption(
        "--architectures", action="store_true", help="every model family, not those alone that differ most"
    )


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config.getoption("thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("thorough") and not config.getoption("thorough"):
            item.add_marker(pytest.mark.skip(reason="make test-all"))
        if item.get_closest_marker("architecture") and not config.getoption("architectures"):
            item.add_marker(pytest.mark.skip(reason="make architectures"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Server tests of a file stay together, since they share servers; they come first, for they take longest."""
    from xdist.scheduler import LoadScopeScheduling

    class FilesOfServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not nodeid.startswith("tests/server/"):
                return nodeid
            file = nodeid.partition("::")[0]
            return "character_server" if file in CLIENTS else file

    return FilesOfServers(config, log)
