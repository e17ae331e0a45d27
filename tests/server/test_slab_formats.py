"""Servers with slabs of few bits: what comes from the cache is what would be computed, and what the definition says."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks.harness.launch import Server
from benchmarks.recall import MODEL
from sgl_ragged.mem_pool.slab_format import FORMATS
from sgl_ragged.profiles.profile import profile_kept
from tests.models import make_profile
from tests.oracle import Oracle, Tokens
from tests.quantised_oracle import restored_past
from tests.rounded import mostly_close
from tests.server.client import Answer, flush, generate, generate_all, ragged_metrics, server_settings
from tests.server.test_host_tier import conversation

pytestmark = pytest.mark.server

SEGMENT, NEW, RATIO, ITEMSIZE, DIM = 64, 12, 0.1, 4, 32
PROMPTS = [conversation(seed, length) for seed, length in enumerate((400, 700, 10 * SEGMENT - 5))]
LATER = conversation(9, 90)


class CodedOracle(Oracle):
    """History as slabs of a format give it back; a query's own segment as it is."""

    def __init__(self, form: str, *args, **more) -> None:
        super().__init__(*args, **more)
        self.form = form

    def _attention(self, module, query, key, value, attention_mask, scaling, **_):
        per_head = query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        places = torch.arange(query.shape[2]) // self.segment
        own = places[:, None] == places
        for head in range(key.shape[1]):
            tokens = Tokens(key[0, head].double().numpy(), value[0, head].double().numpy())
            visible = self._visible(tokens, module.layer_idx, head)
            blocked = torch.from_numpy(~visible)
            pair = restored_past(key[0, head], value[0, head], self.form, self.segment, visible[-1])
            past_keys, past_values = (x.float() for x in pair)
            for q in range(head * per_head, (head + 1) * per_head):
                now, before = (query[0, q] @ keys.T * scaling for keys in (key[0, head], past_keys))
                weights = torch.where(own, now, before).masked_fill(blocked, -torch.inf).softmax(-1)
                output[0, q] = (weights * own) @ value[0, head] + (weights * ~own) @ past_values
        return output.transpose(1, 2).contiguous(), None


def flags(form: str, *more: str) -> list[str]:
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO), "--ragged-segment", str(SEGMENT)),
        *("--kv-bytes", "32MiB", "--chunked-prefill-size", "256", "--ragged-slab-dtype", form, *more),
    ]


def close(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Where chunks or batches move the last bit of a key, a code, a row's scale or its centring may be the next one."""
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    logprobs = (np.concatenate([one.output_logprobs for one in answers]) for answers in (found, expected))
    mostly_close(*logprobs, share=0.97, atol=1e-4, most=1e-2)


def hits_and_misses(server: Server) -> tuple[list[Answer], list[Answer]]:
    """Answers to PROMPTS in a batch and to second turns behind what is cached; the same, each alone and cold."""
    firsts = []
    for prompt in PROMPTS:
        flush(server)
        firsts.append(generate(server, prompt, NEW))
    flush(server)
    found, expected = generate_all(server, PROMPTS, NEW), list(firsts)
    seconds = [[*prompt, *first.tokens, *LATER] for prompt, first in zip(PROMPTS, firsts, strict=True)]
    warm = [generate(server, prompt, NEW) for prompt in seconds]
    for prompt, hit in zip(PROMPTS, warm, strict=True):
        assert hit.cached >= len(prompt) // SEGMENT * SEGMENT
    for prompt in seconds:
        flush(server)
        expected.append(generate(server, prompt, NEW))
    return [*found, *warm], expected


@pytest.mark.parametrize(
    ("form", "kernel"),
    [
        ("k6v4", "numba"),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (("k6v4", "torch"), ("k8v4", "torch"), ("int8", "numba"), ("k4v4", "torch"))
        ),
    ],
)
def test_hits_equal_misses_and_both_what_the_codes_say(servers, tmp_path, form, kernel):
    profile = make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT)
    given = flags(form, "--ragged-profile", str(tmp_path / "profile.safetensors"), "--enable-metrics")
    given += ["--ragged-kernel", kernel]
    with servers.serve(MODEL, *given, log=tmp_path / "server.log") as server:
        info, full = server_settings(server), 2 * DIM * ITEMSIZE
        row, header = (count(DIM, ITEMSIZE) for count in (FORMATS[form].row_bytes, FORMATS[form].header_bytes))
        assert (info["slab_dtype"], info["kernel"]) == (form, kernel)
        assert info["kept_bytes_ratio"] == pytest.approx(RATIO, abs=0.005)
        assert info["kept_ratio"] == pytest.approx((info["kept_bytes_ratio"] * full - header / SEGMENT) / row, abs=1e-4)
        # The metric is the share of the bytes, which with codes is less than that of the tokens.
        assert info["kept_bytes_ratio"] < 0.9 * info["kept_ratio"]
        assert ragged_metrics(server)["kept_ratio"] == pytest.approx(info["kept_bytes_ratio"])
        close(*hits_and_misses(server))
        flush(server)
        every = generate(server, PROMPTS[1], 2, logprobs_from=0)
    share = FORMATS[form].token_share(RATIO, DIM, ITEMSIZE, SEGMENT)
    kept = profile_kept(profile, share, SEGMENT)
    oracle = CodedOracle(form, str(MODEL), kept, SEGMENT, "keydiff")
    expected = oracle.logprobs(PROMPTS[1])
    wanted = expected[-len(every.input_logprobs) :]
    mostly_close(every.input_logprobs, wanted, share=0.99, atol=1e-3, most=2e-2)


@pytest.mark.thorough
def test_ranks_agree(servers, tmp_path):
    make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT)
    given = flags("k8v4", "--ragged-profile", str(tmp_path / "profile.safetensors"))
    answers = []
    for ranks in (1, 2):
        cores = sorted(os.sched_getaffinity(0))
        env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if ranks > 1 else {}
        with servers.serve(MODEL, *given, "--tp", str(ranks), log=tmp_path / "server.log", env=env) as server:
            assert server_settings(server)["fairkv"] == ("permute" if ranks > 1 else "none")
            answers.append([generate(server, prompt, NEW) for prompt in PROMPTS])
    close(*answers)
