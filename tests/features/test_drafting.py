"""What a start with drafts is refused for, and what it changes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.drafts.draft_config import AUX_LAYERS, read_draft_model
from sgl_ragged.features.drafts.draft_model import DraftSettings
from sgl_ragged.features.drafts.draft_pool import DraftSteps
from sgl_ragged.features.drafts.launch import FEATURE as DRAFTS
from sgl_ragged.features.drafts.sglang_flags import draft_backend, refuse_resolved
from sgl_ragged.launch.models import load_model_config
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.start import ModelStart
from tests.models import make_config

MODEL = {"speculative_algorithm": "standalone", "speculative_draft_model_path": "folder"}
HEAD = {"speculative_algorithm": "eagle", "speculative_draft_model_path": "folder", "speculative_eagle_topk": 1} | {
    "speculative_num_steps": 3
}


def launch(view: object = None, **given: object) -> ModelStart:
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
        speculative_num_steps=None,
        speculative_num_draft_tokens=None,
        speculative_token_map=None,
        speculative_draft_window_size=None,
        speculative_use_block_verification=False,
        enable_multi_layer_eagle=False,
        decoupled_spec_role="null",
        disable_overlap_schedule=False,
    )
    start = RaggedOptions(kv_pool="ragged"), SimpleNamespace(**flags | given)
    return ModelStart(*start, view, None, torch.bfloat16, served=view is not None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            ({"speculative_algorithm": name}, f"{name} is not supported")
            for name in ("FROZEN_KV_MTP", "dspark", "UNO", "DFLASH")
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
        ({"speculative_use_rejection_sampling": True}, "rejection sampling has not been tested"),
        ({"speculative_algorithm": "EAGLE3"}, "EAGLE3 has drafts by a model: add --speculative-draft-model-path"),
        ({"speculative_algorithm": "nextn"}, "set --speculative-eagle-topk 1 and --speculative-num-steps"),
        ({**HEAD, "speculative_eagle_topk": None}, "set --speculative-eagle-topk 1 and --speculative-num-steps"),
        ({**HEAD, "speculative_eagle_topk": 4}, "no trees: set --speculative-eagle-topk 1"),
        ({**HEAD, "speculative_num_steps": None}, "needs --speculative-num-steps"),
        ({**HEAD, "enable_multi_layer_eagle": True}, "draft heads of several layers"),
        ({**HEAD, "speculative_token_map": "map.pt"}, "a part of the vocabulary"),
        ({**HEAD, "speculative_draft_window_size": 512}, "a sliding window in a draft model"),
        ({**HEAD, "speculative_use_block_verification": True}, "verification by blocks"),
        ({**HEAD, "speculative_use_rejection_sampling": True}, "rejection sampling has not been tested"),
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


@pytest.mark.parametrize(
    ("resolved", "words"),
    [
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, "SGLang drafts by FROZEN_KV_MTP, which"),
        ({"enable_multi_layer_eagle": True}, "SGLang drafts by several layers, which"),
    ],
)
def test_what_sglang_makes_of_flags_is_refused_as_well(resolved, words):
    """For some models it changes the algorithm by itself."""
    view = SimpleNamespace(**{"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": False, "device": "cpu"})
    refuse_resolved(view)
    vars(view).update(resolved)
    with pytest.raises(RaggedConfigError, match=words) as refused:
        DRAFTS.sglang_settings(None, launch(view, **HEAD))
    assert "\n" not in str(refused.value)


WRONG_HEADS = [
    ("EAGLE", {"architectures": ["LlamaForCausalLM"]}, "is of architecture LlamaForCausalLM, .* tested with Llama"),
    ("EAGLE", {"hidden_size": 128}, "reads hidden states of 128 elements, and they have 256"),
    ("EAGLE", {"vocab_size": 100}, "has 100 tokens, and the model 512"),
    ("NEXTN", {"tie_word_embeddings": True}, "has tie_word_embeddings"),
    ("EAGLE3", {"target_hidden_size": 512}, "reads hidden states of 512 elements"),
    ("EAGLE3", {"eagle_config": {AUX_LAYERS: [0, 2]}}, r"reads after layers \[0, 2\] of 3"),
    ("EAGLE3", {"num_kv_shared_layers": 1}, "as a draft model, .* share keys and values"),
]


@pytest.mark.parametrize(("algorithm", "changed", "words"), WRONG_HEADS)
def test_a_head_for_another_model_is_refused_in_one_line(tmp_path, algorithm, changed, words):
    """And this model's own is read: one layer of four heads."""
    make_config(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_hidden_layers": 1}
    name = "LlamaForCausalLMEagle3" if algorithm == "EAGLE3" else "LlamaForCausalLMEagle"
    config |= {"architectures": [name], "tie_word_embeddings": False, "draft_vocab_size": 512}
    starts = []
    for folder, more in ((tmp_path / "own", {}), (tmp_path / "wrong", changed)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        given = HEAD | {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(folder)}
        model = load_model_config(tmp_path / "model")
        starts.append(replace(launch(**given), model=model, kv_dtype=torch.bfloat16))
    assert read_draft_model(starts[0]).token_bytes == 2 * 1 * 4 * 64 * 2
    with pytest.raises(RaggedConfigError, match=words) as refused:
        read_draft_model(starts[1])
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_layers_that_draft_needs_a_head(tmp_path):
    model = load_model_config(make_config(tmp_path))
    start = replace(launch(**HEAD | {"speculative_draft_model_path": None}), model=model, kv_dtype=torch.bfloat16)
    with pytest.raises(RaggedConfigError, match=r"no layers that draft .* add --speculative-draft-model-path"):
        read_draft_model(start)


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
    view = SimpleNamespace(speculative_num_draft_tokens=16, disable_overlap_schedule=True)
    assert DRAFTS.join(None, plan, launch(view)) == DraftSettings(16)
    overlapped = SimpleNamespace(speculative_num_draft_tokens=16, disable_overlap_schedule=False)
    assert DRAFTS.join(None, plan, launch(overlapped)) == DraftSettings(16, overlapped=True)
    view.speculative_num_draft_tokens = 17
    with pytest.raises(RaggedConfigError, match="more than a segment of 16 tokens"):
        DRAFTS.join(None, plan, launch(view))
