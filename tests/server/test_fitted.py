"""Servers whose segments are fitted: what comes from the cache is what would be computed, and what the definition
says."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from benchmarks.recall import MODEL
from sgl_ragged.mem_pool.slab_format import FORMATS
from sgl_ragged.profiles.codebook import MASSES, OUTPUTS, QUERIES, ROPE
from sgl_ragged.profiles.profile import Profile, profile_kept
from tests import fit_oracle
from tests.models import make_profile
from tests.oracle import Oracle, Tokens
from tests.server.client import Answer, flush, generate, server_settings
from tests.server.test_slab_formats import NEW, PROMPTS, SEGMENT, close, hits_and_misses

pytestmark = pytest.mark.server

DIM = 32
RATIO = {"wide": 0.4, "k8v4": 0.2}


class FittedOracle(Oracle):
    """History in wide slabs as the codebook corrects it; a query's own segment as it is."""

    def __init__(self, profile: Profile, kept: np.ndarray) -> None:
        super().__init__(str(MODEL), kept, SEGMENT, "keydiff")
        self.profile = profile

    def _past(self, layer: int, head: int, tokens: Tokens, visible: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.from_numpy(x.copy()) for x in (tokens.keys, tokens.values))
        statistics = self.profile.statistics
        queries = (torch.from_numpy(statistics[QUERIES][layer, head]).float() * tokens.scale).half().double().numpy()
        book = fit_oracle.Book(
            queries / tokens.scale,
            statistics[MASSES][layer, head].astype(np.float64),
            statistics[OUTPUTS][layer, head].astype(np.float64),
            statistics[ROPE[0]][layer, 0].astype(np.float64),
        )
        for number in range(len(tokens) // SEGMENT):
            own = slice(number * SEGMENT, (number + 1) * SEGMENT)
            kept = np.flatnonzero(visible[-1, own]) if own.stop < len(tokens) else []
            if not len(kept) or len(kept) > 3 * SEGMENT // 4:
                continue
            found = fit_oracle.fitted(tokens.keys[own], tokens.values[own], kept, number, book, tokens.scale)
            rows = torch.from_numpy(kept + own.start)
            keys[rows], values[rows] = torch.from_numpy(found.keys), torch.from_numpy(found.values)
        return keys.float(), values.float()

    def _attention(self, module, query, key, value, attention_mask, scaling, **_):
        per_head = query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        places = torch.arange(query.shape[2]) // self.segment
        own = places[:, None] == places
        for head in range(key.shape[1]):
            tokens = Tokens(key[0, head].double().numpy(), value[0, head].double().numpy(), scale=scaling)
            visible = self._visible(tokens, module.layer_idx, head)
            blocked = torch.from_numpy(~visible)
            past_keys, past_values = self._past(module.layer_idx, head, tokens, visible)
            for q in range(head * per_head, (head + 1) * per_head):
                now, before = (query[0, q] @ keys.T * scaling for keys in (key[0, head], past_keys))
                weights = torch.where(own, now, before).masked_fill(blocked, -torch.inf).softmax(-1)
                output[0, q] = (weights * own) @ value[0, head] + (weights * ~own) @ past_values
        return output.transpose(1, 2).contiguous(), None


def flags(form: str, folder, *more: str) -> list[str]:
    return [
        *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "4"),
        *("--kv-pool", "ragged", "--ragged-ratio", str(RATIO[form]), "--ragged-segment", str(SEGMENT)),
        *("--ragged-profile", str(folder / "profile.safetensors"), "--ragged-slab-dtype", form),
        *("--kv-bytes", "32MiB", "--chunked-prefill-size", "256", *more),
    ]


def equal(form: str, found: list[Answer], expected: list[Answer]) -> None:
    """As near as unfitted answers of the same format are."""
    if form != "wide":
        close(found, expected)
        return
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.output_logprobs, other.output_logprobs, atol=1e-4)


def test_hits_equal_misses_and_both_what_the_definition_says(servers, tmp_path):
    profile = make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT, codebook=True)
    with servers.serve(MODEL, *flags("wide", tmp_path), log=tmp_path / "server.log") as server:
        assert server_settings(server)["fitted"]
        equal("wide", *hits_and_misses(server))
        flush(server)
        every = generate(server, PROMPTS[1], 2, logprobs_from=0)
    assert "fitted to" in (tmp_path / "server.log").read_text()
    share = FORMATS["wide"].token_share(RATIO["wide"], DIM, 4, SEGMENT)
    wanted = FittedOracle(profile, profile_kept(profile, share, SEGMENT)).logprobs(PROMPTS[1])
    np.testing.assert_allclose(every.input_logprobs, wanted[-len(every.input_logprobs) :], rtol=0, atol=1e-4)


def test_hits_equal_misses_in_codes(servers, tmp_path):
    """Answers are not compared with the definition. Errors that are fed back move codes far where the made-up queries
    of the codebook see nothing, and last bits decide where to. tests/fitting compares codes of given keys and values.
    """
    make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT, codebook=True)
    with servers.serve(MODEL, *flags("k8v4", tmp_path), log=tmp_path / "server.log") as server:
        assert server_settings(server)["fitted"]
        equal("k8v4", *hits_and_misses(server))


@pytest.mark.thorough
def test_without_it_answers_are_those_of_what_is_kept(servers, tmp_path):
    """And a profile without a codebook says so."""
    make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT, codebook=True)
    answers = []
    for more in (("--ragged-fit", "none"), (), None):
        if more is None:
            make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT)
        with servers.serve(MODEL, *flags("wide", tmp_path, *(more or ())), log=tmp_path / "server.log") as server:
            answers.append(generate(server, PROMPTS[1], 2, logprobs_from=0).input_logprobs)
            assert server_settings(server)["fitted"] == (more == ())
    assert "the profile has no codebook; " in (tmp_path / "server.log").read_text()
    np.testing.assert_allclose(answers[0], answers[2], atol=1e-6)
    assert np.abs(answers[1] - answers[0]).max() > 1e-2


@pytest.mark.parametrize("placed", [pytest.param("permute", marks=pytest.mark.thorough), "split"])
def test_ranks_agree(servers, tmp_path, placed):
    make_profile(MODEL, tmp_path / "profile.safetensors", segment=SEGMENT, codebook=True)
    answers = []
    for ranks in (1, 2):
        cores = sorted(os.sched_getaffinity(0))
        env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if ranks > 1 else {}
        more = ("--tp", "2", "--ragged-fairkv", placed) if ranks > 1 else ()
        with servers.serve(MODEL, *flags("wide", tmp_path, *more), log=tmp_path / "server.log", env=env) as server:
            answers.append([generate(server, prompt, NEW) for prompt in PROMPTS])
    equal("wide", *answers)
