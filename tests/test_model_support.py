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
from sgl_ragged.mem_pool.kv_dtype import KV_DTYPES
from sgl_ragged.plugin.model_support import (
    expected_kv_dtype,
    load_model_config,
    refuse_kv_dtype,
    refuse_kv_scheme,
    refuse_model,
)
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
    ("GptOss", "GptOssForCausalLM", {"head_dim": 64, "sliding_window": 128, "num_local_experts": 2}, "sliding-window"),
    (
        "Exaone4",
        "Exaone4ForCausalLM",
        {"sliding_window": 128, "sliding_window_pattern": "LG", "layer_types": WINDOWED},
        "sliding-window",
    ),
    ("Qwen3Next", "Qwen3NextForCausalLM", {"head_dim": 64, "num_experts": 2}, "linear-attention"),
    ("Qwen3_5Text", "Qwen3_5ForCausalLM", {"head_dim": 64}, "linear-attention"),
    ("FalconH1", "FalconH1ForCausalLM", {"head_dim": 64}, "linear-attention"),
    ("Cohere2", "Cohere2ForCausalLM", {"layer_types": WINDOWED, "sliding_window": 128}, "sliding-window"),
    ("Gemma2", "Gemma2ForCausalLM", {"head_dim": 64, "layer_types": WINDOWED}, "sliding-window"),
    ("Gemma3Text", "Gemma3ForCausalLM", {"head_dim": 64, "layer_types": WINDOWED}, "sliding-window"),
    ("Olmo3", "Olmo3ForCausalLM", {"layer_types": WINDOWED, "sliding_window": 128}, "sliding-window"),
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
    # SGLang's name for it: it serves the third Olmo as the second.
    assert said.startswith(f"{architecture.replace('Olmo3', 'Olmo2')} cannot be served with --kv-pool ragged: ")
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


STATIC = {"type": "float", "num_bits": 8, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("where", "section", "found"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, False),
        ("config.json", {"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, True),
        ("config.json", {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}, True),
        ("config.json", {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC | {"dynamic": True}}, False),
        ("config.json", {"quant_method": "fp8"}, False),
    ],
)
def test_a_checkpoint_that_asks_for_fp8_gets_it(tmp_path, monkeypatch, where, section, found):
    model_config = load_model_config(make_llama(tmp_path))
    if where == "config.json":
        monkeypatch.setattr(model_config, "hf_quant_config", section)
    else:
        (tmp_path / where).write_text(json.dumps(section))
    assert expected_kv_dtype(model_config, "auto") == (torch.float8_e4m3fn if found else model_config.dtype)
    assert expected_kv_dtype(model_config, "fp8_e5m2") == torch.float8_e5m2
    assert expected_kv_dtype(model_config, "bfloat16") == torch.bfloat16


@pytest.mark.parametrize("more", [{"dynamic": True}, {"strategy": "attn_head"}, {"symmetric": False}])
def test_scales_that_sglang_would_leave_out_are_refused(tmp_path, monkeypatch, more):
    model_config = load_model_config(make_llama(tmp_path))
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC | more}
    monkeypatch.setattr(model_config, "hf_quant_config", scheme)
    refuse_kv_scheme(model_config, "auto")
    with pytest.raises(RaggedConfigError, match=r"LlamaForCausalLM asks for scales.*--kv-cache-dtype bfloat16"):
        refuse_kv_scheme(model_config, "fp8_e4m3")
    monkeypatch.setattr(model_config, "hf_quant_config", {**scheme, "kv_cache_scheme": STATIC})
    refuse_kv_scheme(model_config, "fp8_e4m3")


def test_the_resolved_dtype_has_the_last_word():
    for dtype in KV_DTYPES:
        refuse_kv_dtype(dtype)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2, torch.int8, torch.uint8):
        with pytest.raises(RaggedConfigError, match="pass --kv-cache-dtype bfloat16"):
            refuse_kv_dtype(dtype)
