"""Random lives of requests with the torch operations; what is checked after each step is in `tests/pool_machine.py`."""

from __future__ import annotations

from tests.examples import examples
from tests.pool_machine import PoolMachine

PoolMachine.TestCase.settings = examples(40, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
