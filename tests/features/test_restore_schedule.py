"""How much is loaded and how much computed: Krul's schedule, and where it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ragged.features.host_tier.restore_schedule import (
    AUTO,
    LOAD,
    PROBE_EVERY,
    RECOMPUTE,
    Rate,
    StoragePays,
    recomputed_first,
)


def rate(seconds: float) -> Rate:
    found = Rate()
    found.add(1, seconds)
    return found


def test_both_end_together():
    assert recomputed_first(100, RECOMPUTE, compute=rate(0.01), load=rate(0.01)) == 50
    assert recomputed_first(100, AUTO, compute=rate(0.03), load=rate(0.01)) == 25


# An 8B model on an H100 by arithmetic: 8 ms to compute a segment; 0.2 ms for its 10 MB over PCIe 5, 1.7 ms from NVMe,
# 10 ms at 1 GB/s.
@pytest.mark.parametrize(("load_s", "computed"), [(0.0002, 0), (0.0017, 0), (0.010, 22)])
def test_it_pays_for_what_is_slow(load_s, computed):
    assert recomputed_first(40, AUTO, compute=rate(0.008), load=rate(load_s)) == computed


def test_nothing_is_computed_that_was_not_asked_for():
    assert recomputed_first(100, LOAD, compute=rate(0.001), load=rate(1)) == 0
    assert recomputed_first(1, RECOMPUTE, compute=rate(0.001), load=rate(1)) == 0


def test_without_measurements():
    assert recomputed_first(9, AUTO, compute=Rate(), load=rate(1)) == 0
    assert recomputed_first(9, RECOMPUTE, compute=rate(1), load=Rate()) == 4


seconds = st.floats(1e-6, 1)


@given(segments=st.integers(0, 500), compute=seconds, load=seconds, mode=st.sampled_from([AUTO, LOAD, RECOMPUTE]))
def test_auto_is_never_slower_than_loading(segments, compute, load, mode):
    count = recomputed_first(segments, mode, rate(compute), rate(load))
    assert 0 <= count <= segments
    if mode == AUTO:
        assert max(count * compute, (segments - count) * load) <= segments * load + 1e-12


def test_a_rate_follows_what_it_measures():
    found = rate(1.0)
    for _ in range(50):
        found.add(10, 1.0)
    assert found.segment_s == pytest.approx(0.1, rel=1e-3)
    found.add(0, 5.0)
    assert found.segment_s == pytest.approx(0.1, rel=1e-3)


def test_a_slow_storage_is_probed_now_and_then():
    pays = StoragePays(AUTO, rate(0.01))
    assert pays()
    pays.read.add(1, 0.1)
    assert [pays() for _ in range(2 * PROBE_EVERY)].count(True) == 2
    pays.read.add(1, 0)
    for _ in range(20):
        pays.read.add(1, 0)
    assert pays()
    forced = StoragePays(RECOMPUTE, rate(0.01))
    forced.read.add(1, 0.1)
    assert forced()
