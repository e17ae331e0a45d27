"""What a start with drafts is refused for, and what it changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ragged.drafts.sglang_draft_backend import DraftSteps
from sgl_ragged.drafts.sglang_feature import DRAFTS, Drafts
from sgl_ragged.drafts.sglang_flags import draft_backend
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.launch import Launch
from sgl_ragged.plugin.options import RaggedOptions

MODEL = {"speculative_algorithm": "standalone", "speculative_draft_model_path": "folder"}


def launch(view: object = None, **given: object) -> Launch:
    flags = dict(
        speculative_algorithm="NGRAM",
        speculative_ngram_max_bfs_breadth=1,
        speculative_ngram_external_corpus_path=None,
        speculative_ngram_external_sam_budget=0,
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        enable_watermark=False,
        speculative_draft_model_path=None,
        speculative_eagle_topk=None,
        speculative_draft_kv_cache_dtype=None,
        speculative_draft_attention_backend=None,
        decoupled_spec_role="null",
    )
    return Launch(RaggedOptions(kv_pool="ragged"), SimpleNamespace(**flags | given), view=view)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            ({"speculative_algorithm": name}, f"{name} is not supported")
            for name in ("EAGLE", "EAGLE3", "nextn", "DFLASH")
        ),
        ({"speculative_algorithm": "STANDALONE"}, "add --speculative-draft-model-path"),
        ({**MODEL, "speculative_eagle_topk": 2}, "no trees: set --speculative-eagle-topk 1"),
        ({**MODEL, "speculative_draft_kv_cache_dtype": "fp8_e4m3"}, "has the model's dtype"),
        ({**MODEL, "decoupled_spec_role": "verifier"}, "from another server"),
        ({**MODEL, "speculative_adaptive": True}, "drop --speculative-adaptive"),
        ({"speculative_ngram_max_bfs_breadth": 4}, "no trees: set --speculative-ngram-max-bfs-breadth 1"),
        ({"speculative_ngram_external_corpus_path": "c"}, "an external corpus"),
        ({"speculative_ngram_external_sam_budget": 2}, "an external corpus"),
        ({"speculative_adaptive": True}, "drop --speculative-adaptive"),
        ({"speculative_use_rejection_sampling": True}, "needs drafts by EAGLE"),
        ({"enable_watermark": True}, "watermarks"),
    ],
)
def test_what_is_refused_says_why_in_one_line(given, words):
    with pytest.raises(RaggedConfigError, match=words) as refused:
        DRAFTS.settle(launch(**given))
    assert "\n" not in str(refused.value)


def test_accepted_lengths_that_are_made_up_are_refused(monkeypatch):
    DRAFTS.settle(launch())
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(RaggedConfigError, match="unset it"):
        DRAFTS.settle(launch())
    monkeypatch.delenv("SGLANG_SIMULATE_ACC_LEN")
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "true")
    DRAFTS.settle(launch())
    with pytest.raises(RaggedConfigError, match="plans verification before drafts are known"):
        DRAFTS.settle(launch(**MODEL))


def test_a_draft_model_has_attention_of_its_own():
    """Of the device, or what was asked for where it is that."""
    for device, backend in (("cpu", "torch_native"), ("cuda", "triton")):
        for asked in (None, backend):
            start = launch(SimpleNamespace(device=device), **MODEL, speculative_draft_attention_backend=asked)
            assert draft_backend(start) == backend
        with pytest.raises(RaggedConfigError, match="fa3 has not been tested"):
            draft_backend(launch(SimpleNamespace(device=device), **MODEL, speculative_draft_attention_backend="fa3"))
    with pytest.raises(RaggedConfigError, match="not been tested on xpu"):
        draft_backend(launch(SimpleNamespace(device="xpu"), **MODEL))


def test_a_step_of_drafting_sees_what_counts_and_the_drafts_up_to_its_own():
    """Against attention to these tokens alone, of two requests whose tokens lie anywhere."""
    rng, dim, lengths = torch.Generator().manual_seed(0), 8, [3, 11]
    keys, values = torch.randn(2, 64, 1, dim, generator=rng)
    queries = torch.randn(2, 1, dim, generator=rng)
    table = torch.randperm(64, generator=rng).view(2, 32)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    steps = DraftSteps(runner, 4).attn_backends
    assert len(steps) == 3
    for number, step in enumerate(steps):
        rows, before = torch.tensor([1, 0]), torch.tensor(lengths)
        found = step._run_sdpa_forward_decode(
            queries, torch.empty_like(queries), keys, values, table, rows, before, scaling=0.5
        )
        for query, output, row, length in zip(queries, found, (1, 0), lengths, strict=True):
            seen = table[row, : length + number + 1]
            weights = (0.5 * keys[seen, 0] @ query[0]).softmax(0)
            torch.testing.assert_close(output[0], weights @ values[seen, 0])
        assert before.tolist() == lengths


def test_a_chain_is_no_longer_than_a_segment():
    plan = SimpleNamespace(segment=16)
    view = SimpleNamespace(speculative_num_draft_tokens=16)
    assert DRAFTS.join(True, plan, launch(view)) == Drafts(16)
    view.speculative_num_draft_tokens = 17
    with pytest.raises(RaggedConfigError, match="more than a segment of 16 tokens"):
        DRAFTS.join(True, plan, launch(view))
