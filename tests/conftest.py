"""Settings for all tests; what runs in `make test-all` or `make architectures` only; how tests are shared out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
    parser.addoption("--kits", action="store_true", help="SGLang's test kits that `make test` leaves out")
    parser.addoption("--kit-pool", choices=("ragged", "token"), default="ragged", help="the pool that kits run on")
    parser.addoption("--margin", type=float, default=1.0, help="divide tolerances of assert_allclose and assert_close")


def _tightened(compare: Callable, margin: float, defaults: dict[str, float]) -> Callable:
    """`compare` with its tolerances divided by `margin`; `defaults`: those that it has where none are given."""

    def tightened(*args: Any, **more: Any) -> None:
        given = {name: more[name] for name in ("rtol", "atol") if more.get(name) is not None} or defaults
        compare(*args, **more | {name: value / margin for name, value in given.items()})

    return tightened


@pytest.fixture(autouse=True)
def margin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --margin, tests fail whose results are near their tolerances (`make processors`)."""
    share = request.config.getoption("margin")
    if share != 1:
        found = np.testing.assert_allclose, torch.testing.assert_close
        monkeypatch.setattr(np.testing, "assert_allclose", _tightened(found[0], share, {"rtol": 1e-7}))
        monkeypatch.setattr(torch.testing, "assert_close", _tightened(found[1], share, {}))


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config.getoption("thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("thorough") and not config.getoption("thorough"):
            item.add_marker(pytest.mark.skip(reason="make test-all"))
        if item.get_closest_marker("architecture") and not config.getoption("architectures"):
            item.add_marker(pytest.mark.skip(reason="make architectures"))
        if item.get_closest_marker("kit") and not config.getoption("kits"):
            item.add_marker(pytest.mark.skip(reason="make kits"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file with servers, or with a process that answers all of them, stay together. They come first."""
    from xdist.scheduler import LoadScopeScheduling

    class FilesOfServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not nodeid.startswith(("tests/server/", "tests/test_commands.py")):
                return nodeid
            file = nodeid.partition("::")[0]
            return "character_server" if file in CLIENTS else file

    return FilesOfServers(config, log)
