"""Which models are refused: by the launcher before SGLang's own assertions, by the command line in the same words."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers
from sglang.srt.plugins import load_plugins

from sgl_ragged import cli
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin import model_support
from sgl_ragged.plugin.model_support import load_model_config, refuse_kv_dtype, refuse_kv_scheme, refuse_model
from sgl_ragged.plugin.options import ATTRIBUTE
from tests.models import make_llama
from tests.test_plugin import refusal, resolved

load_plugins()

SIZES = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
WINDOWED = ["sliding_attention", "full_attention"] * 2

REFUSED = [
    (
        "GptOss",
        "GptOssForCausalLM",
        {"head_dim": 64, "sliding_window": 128, "num_local_experts": 2, "layer_types": ["sliding_attention"] * 4},
        "nothing to compress",
    ),
    ("Qwen3Next", "Qwen3NextForCausalLM", {"head_dim": 64, "num_experts": 2}, "linear-attention"),
    ("Qwen3_5Text", "Qwen3_5ForCausalLM", {"head_dim": 64}, "linear-attention"),
    ("FalconH1", "FalconH1ForCausalLM", {"head_dim": 64}, "linear-attention"),
    ("Gemma2", "Gemma2ForCausalLM", {"head_dim": 64, "layer_types": WINDOWED}, "caps logits"),
    ("DeepseekV3", "DeepseekV3ForCausalLM", {}, "MLA attention"),
    ("Bert", "BertModel", {}, "not causal"),
]
"""Class of the config in transformers, architecture, what goes to the config, the reason."""


def make_config(folder, name: str, architecture: str, more: dict) -> str:
    config_class = getattr(transformers, f"{name}Config")
    config_class(architectures=[architecture], **(SIZES | more)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("name", "architecture", "more", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_launcher_and_command_line_refuse_alike(tmp_path, monkeypatch, name, architecture, more, reason):
    model = make_config(tmp_path, name, architecture, more)
    said = refusal(model, "--kv-pool", "ragged").removeprefix("sgl_ragged: ")
    assert said.startswith(f"{architecture} cannot be served with --kv-pool ragged: ")
    assert reason in said
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", "--model", model, "--kv-bytes", "1GiB"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == f"sgl-ragged: {said}"


@pytest.mark.parametrize(
    ("name", "architecture", "more"),
    [
        ("Olmo2", "Olmo2ForCausalLM", {}),
        # SGLang serves these without their windows.
        ("Qwen2", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}),
        ("Mistral", "MistralForCausalLM", {"sliding_window": 128}),
    ],
)
def test_models_that_are_served_pass(tmp_path, name, architecture, more):
    refuse_model(load_model_config_of(tmp_path, name, architecture, more))
    resolved(tmp_path, "--kv-pool", "ragged")


HYBRID = [
    ("GptOss", "GptOssForCausalLM", {"head_dim": 64, "sliding_window": 128, "num_local_experts": 2}),
    ("Exaone4", "Exaone4ForCausalLM", {"sliding_window": 128, "sliding_window_pattern": "LG"}),
    ("Cohere2", "Cohere2ForCausalLM", {"sliding_window": 128}),
    ("Gemma3Text", "Gemma3ForCausalLM", {"head_dim": 64, "sliding_window": 128}),
    ("Olmo3", "Olmo3ForCausalLM", {"sliding_window": 128}),
]


@pytest.mark.parametrize(("name", "architecture", "more"), HYBRID, ids=[row[0] for row in HYBRID])
def test_windowed_layers_get_a_pool_of_their_own(tmp_path, name, architecture, more):
    """Whether SGLang calls the model hybrid or not, and whichever backends it asks for by name."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    make_config(tmp_path, name, architecture, more | {"layer_types": WINDOWED})
    args = resolved(tmp_path, "--kv-pool", "ragged")
    assert resolving_view(args).attention_backend == "ragged"
    assert resolving_view(args).disable_hybrid_swa_memory is False
    model_config = model_config_of(args)
    assert model_config.swa_attention_layer_ids == [0, 2]
    assert getattr(args, ATTRIBUTE).plan.geometry.layer_numbers == (1, 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--enable-hierarchical-cache",), "not supported for models with sliding-window layers"),
        (("--disable-hybrid-swa-memory",), "drop it"),
        (("--tp", "2", "--ragged-fairkv", "split"), "sliding-window layers keep theirs"),
    ],
)
def test_what_does_not_go_with_windowed_layers(tmp_path, flags, words):
    make_config(tmp_path, "Gemma3Text", "Gemma3ForCausalLM", HYBRID[3][2] | {"layer_types": WINDOWED})
    assert words in refusal(tmp_path, "--kv-pool", "ragged", *flags)


def load_model_config_of(folder, name, architecture, more):
    make_config(folder, name, architecture, more)
    return load_model_config(folder)


def test_layout_plans_what_the_server_serves_under_other_names(tmp_path, monkeypatch, capsys):
    """GPT-J's config calls its sizes n_layer, n_head and n_embd."""
    config = transformers.GPTJConfig(
        architectures=["GPTJForCausalLM"],
        vocab_size=512,
        n_positions=2048,
        n_embd=256,
        n_layer=3,
        n_head=4,
        rotary_dim=16,
    )
    config.save_pretrained(tmp_path)
    resolved(tmp_path, "--kv-pool", "ragged")
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", "--model", str(tmp_path), "--kv-bytes", "1GiB", "--json"])
    cli.main()
    kept = json.loads(capsys.readouterr().out)["kept"]
    assert (len(kept), len(kept[0])) == (3, 4)


@pytest.mark.parametrize(
    ("where", "section", "found"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, False),
        ("config.json", {"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, True),
        (
            "config.json",
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}},
            False,
        ),
    ],
)
def test_a_checkpoint_that_asks_for_fp8_is_refused(tmp_path, monkeypatch, where, section, found):
    model_config = load_model_config(make_llama(tmp_path))
    if where == "config.json":
        monkeypatch.setattr(model_config, "hf_quant_config", section)
    else:
        (tmp_path / where).write_text(json.dumps(section))
    refuse_kv_scheme(model_config, "bfloat16")
    if not found:
        refuse_kv_scheme(model_config, "auto")
        return
    with pytest.raises(
        RaggedConfigError, match=r"LlamaForCausalLM asks for a KV cache in FP8.*--kv-cache-dtype bfloat16"
    ):
        refuse_kv_scheme(model_config, "auto")


def test_the_launcher_refuses_such_a_checkpoint(tmp_path, monkeypatch):
    make_llama(tmp_path)
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert "asks for a KV cache in FP8" in refusal(tmp_path, "--kv-pool", "ragged")


def test_the_resolved_dtype_has_the_last_word():
    for dtype in model_support.KV_DTYPES:
        refuse_kv_dtype(dtype)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8):
        with pytest.raises(RaggedConfigError, match="pass --kv-cache-dtype bfloat16"):
            refuse_kv_dtype(dtype)
