"""The random lives of `tests/serve/test_pool_property.py` with the Triton operations in the interpreter."""

from __future__ import annotations

from hypothesis import HealthCheck

from sgl_ragged.attention.triton_ops import TritonOps
from sgl_ragged.attention.triton_seal import TritonSealer
from sgl_ragged.mem_pool.layout import SlabLayout
from sgl_ragged.mem_pool.slab_store import SlabStore
from tests.examples import examples
from tests.kernels.operations import triton_operations, triton_sealer
from tests.pool_machine import ROWS, SLOTS, PoolMachine


class TritonPoolMachine(PoolMachine):
    def make_sealer(self, layout: SlabLayout) -> TritonSealer:
        return triton_sealer(layout)

    def make_operations(self, store: SlabStore) -> TritonOps:
        return triton_operations(store, SLOTS, max_batch=ROWS)


TritonPoolMachine.TestCase.settings = examples(2, stateful_step_count=8, suppress_health_check=list(HealthCheck))
TestTritonPoolMachine = TritonPoolMachine.TestCase
