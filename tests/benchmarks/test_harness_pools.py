"""What a pool's name asks of the server that a benchmark starts."""

from __future__ import annotations

import pytest

from benchmarks.harness.pools import Pool, server_arguments


def flags(name: str) -> dict[str, str]:
    arguments = [one for one in server_arguments(Pool.parse(name), 4, "8MiB", on_cpu=True) if one[:5] != "--ena"]
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


@pytest.mark.parametrize(("name", "slabs"), [("ragged@0.3", "wide"), ("ragged@0.3+slab-dtype=k8v4", "k8v4")])
def test_pools_are_wide_unless_their_names_say_otherwise(name, slabs):
    """Commands from before slabs of codes name what they measured."""
    chosen = flags(name)
    assert (chosen["--kv-pool"], chosen["--ragged-ratio"], chosen["--ragged-slab-dtype"]) == ("ragged", "0.3", slabs)


def test_drafts_are_sglangs():
    pool = Pool.parse("ragged@0.3+draft=4+scorer=h2o")
    assert pool.name == "ragged@0.3+draft=4+scorer=h2o"
    assert " ".join(pool.flags) == (
        "--ragged-scorer h2o --speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 "
        "--speculative-num-draft-tokens 4"
    )


def test_the_token_pool_has_no_ragged_flags():
    assert not [one for one in flags("token") if one.startswith("--ragged")]
