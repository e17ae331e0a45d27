"""Slabs of codes as the launcher plans them: what the ratio means, and where they are refused."""

from __future__ import annotations

import pytest
from sglang.srt.server_args import prepare_server_args

from sgl_ragged.launch.plan import ATTRIBUTE
from tests.launch.test_plugin import WIDE, refusal, resolved
from tests.models import make_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-dtype", "fp8_e4m3"), "rounded twice; use wide"),
        pytest.param(("--ragged-reservoir", "1GiB"), "read keys as numbers; use wide"),
    ],
)
def test_slabs_of_codes_are_refused_where_nothing_can_read_them(llama, flags, words):
    message = refusal(llama, "--kv-pool", "ragged", "--ragged-slab-dtype", "k8v4", *flags)
    assert "--ragged-slab-dtype k8v4 is not available here" in message
    assert words in message


def test_slabs_of_codes_lie_on_the_host_as_they_are_alone(llama):
    tier = ("--kv-pool", "ragged", "--ragged-slab-dtype", "k8v4", "--enable-hierarchical-cache")
    assert "would round it again; use exact" in refusal(llama, *tier, "--ragged-host-codec", "fp8")
    served = {
        getattr(resolved(llama, *tier[:2], *flags, tier[-1]), ATTRIBUTE).plan.settings_of("tier").served
        for flags in (WIDE, tier[2:4], ("--ragged-slab-dtype", "int8"))
    }
    assert len(served) == 3


def test_the_ratio_of_codes_is_one_of_bytes(llama):
    """The model has heads of 64 dimensions in 32 bits: a token takes 512 bytes, in K8V4 100, in int8 132, in K4V4 68,
    and moments of a segment of 256 take as much as one byte of each of its tokens."""

    def plan(*flags: str):
        return getattr(resolved(llama, "--kv-pool", "ragged", "--dtype", "float32", *flags), ATTRIBUTE).plan

    for form, row, header in (("wide", 512, 0), ("int8", 132, 0), ("k8v4", 100, 0), ("k4v4", 68, 1)):
        found = plan("--ragged-slab-dtype", form, "--ragged-ratio", "0.125")
        assert found.kept.mean() / 256 == pytest.approx((0.125 * 512 - header) / row, abs=0.01)
        assert found.layout(0).byte_share(4) == pytest.approx(0.125, abs=0.003)
    assert (plan("--ragged-slab-dtype", "k8v4", "--ragged-ratio", "0.2").kept == 256).all()
    # In 32 bits, int8 holds every token in .26 of the bytes.
    assert plan().form.name == "int8"
    eight_bits = plan("--kv-cache-dtype", "fp8_e5m2")
    assert (eight_bits.form.name, eight_bits.ratio) == ("wide", 0.5)
    # Less than wide slabs can keep: 16 of 256 tokens are .0625 of their bytes, and .0122 of those of codes.
    plan("--ragged-slab-dtype", "k8v4", "--ragged-ratio", "0.02")
    tiny = ("--ragged-slab-dtype", "k8v4", "--ragged-ratio", "0.01")
    message = refusal(llama, "--kv-pool", "ragged", "--dtype", "float32", *tiny)
    assert "a ratio of 0.0123" in message
    tiny = ("--ragged-slab-dtype", "k4v4", "--ragged-ratio", "0.01")
    assert "a ratio of 0.0103" in refusal(llama, "--kv-pool", "ragged", "--dtype", "float32", *tiny)


def test_nothing_is_calibrated_where_every_token_is_kept(llama):
    """All tokens in 8 bits are half of the bytes: no scorer is asked."""
    codes = ("--ragged-slab-dtype", "int8", "--ragged-ratio", "0.3")
    args = prepare_server_args(
        ["--model-path", str(llama), "--device", "cpu", "--kv-pool", "ragged", "--dtype", "float32", *codes]
    )
    args.resolve_once()
    plan = getattr(args, ATTRIBUTE).plan
    assert (plan.kept == plan.segment).all()
    assert plan.profile == "uniform"
