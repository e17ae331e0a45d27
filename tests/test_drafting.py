"""What a start with drafts is refused for, and what it changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.cuda_graph_config import Phase

from sgl_ragged.drafts.sglang_feature import DRAFTS, Drafts
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.launch import Launch
from sgl_ragged.plugin.options import RaggedOptions


def launch(view: object = None, **given: object) -> Launch:
    flags = dict(
        speculative_algorithm="NGRAM",
        speculative_ngram_max_bfs_breadth=1,
        speculative_ngram_external_corpus_path=None,
        speculative_ngram_external_sam_budget=0,
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        enable_watermark=False,
        cuda_graph_backend_decode=None,
        cuda_graph_config=None,
    )
    return Launch(RaggedOptions(kv_pool="ragged"), SimpleNamespace(**flags | given), view=view)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({"speculative_algorithm": name}, f"{name} is not supported") for name in ("EAGLE", "STANDALONE", "nextn")),
        ({"speculative_ngram_max_bfs_breadth": 4}, "no trees: set --speculative-ngram-max-bfs-breadth 1"),
        ({"speculative_ngram_external_corpus_path": "c"}, "an external corpus"),
        ({"speculative_ngram_external_sam_budget": 2}, "an external corpus"),
        ({"speculative_adaptive": True}, "drop --speculative-adaptive"),
        ({"speculative_use_rejection_sampling": True}, "needs a draft model"),
        ({"enable_watermark": True}, "watermarks"),
        ({"cuda_graph_backend_decode": "full"}, "CUDA graphs of decode"),
        ({"cuda_graph_config": {Phase.DECODE: {"backend": "full"}}}, "CUDA graphs of decode"),
    ],
)
def test_what_is_refused_says_why_in_one_line(given, words):
    with pytest.raises(RaggedConfigError, match=words) as refused:
        DRAFTS.settle(launch(**given))
    assert "\n" not in str(refused.value)


def test_accepted_lengths_that_are_made_up_are_refused(monkeypatch):
    DRAFTS.settle(launch(cuda_graph_backend_decode="disabled"))
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(RaggedConfigError, match="unset it"):
        DRAFTS.settle(launch())


def test_a_chain_is_no_longer_than_a_segment():
    plan = SimpleNamespace(segment=16)
    view = SimpleNamespace(speculative_num_draft_tokens=16)
    assert DRAFTS.join(True, plan, launch(view)) == Drafts(16)
    view.speculative_num_draft_tokens = 17
    with pytest.raises(RaggedConfigError, match="more than a segment of 16 tokens"):
        DRAFTS.join(True, plan, launch(view))
