"""Which models are refused: by the launcher before SGLang's own assertions, by the command line in the same words."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers
from sglang.srt.configs import InklingMMConfig
from sglang.srt.plugins import load_plugins

from calib.__main__ import main as calibrate
from sgl_ragged import cli
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.model_options import read_sizes
from sgl_ragged.launch.model_source import read_config
from sgl_ragged.launch.models import (
    expected_kv_dtype,
    load_model_config,
    model_geometry,
    refuse_kv_scheme,
    refuse_model,
)
from sgl_ragged.launch.multimodal import media_reason
from sgl_ragged.launch.plan import ATTRIBUTE
from sgl_ragged.mem_pool.kv_dtype import KV_DTYPES, refuse_kv_dtype
from sgl_ragged.profiles.geometry import ModelGeometry
from tests.launch.test_plugin import refusal, resolved
from tests.models import make_llama

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
    ("Llama", "Mistral4ForCausalLM", {}, "this release of SGLang has no model class for it"),
]
"""Class of the config in transformers, architecture, what goes to the config, the reason."""


def make_config(folder, name: str, architecture: str, more: dict) -> str:
    config_class = getattr(transformers, f"{name}Config")
    config_class(architectures=[architecture], **(SIZES | more)).save_pretrained(folder)
    return str(folder)


def refused_alike(model: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The words of the launcher, which are those of the command line."""
    said = refusal(model, "--kv-pool", "ragged").removeprefix("sgl_ragged: ")
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", "--model", model, "--kv-bytes", "1GiB"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == f"sgl-ragged: {said}"
    return said


@pytest.mark.parametrize(("name", "architecture", "more", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_launcher_and_command_line_refuse_alike(tmp_path, monkeypatch, name, architecture, more, reason):
    said = refused_alike(make_config(tmp_path, name, architecture, more), monkeypatch)
    assert said.startswith(f"{architecture} cannot be served with --kv-pool ragged: ")
    assert reason in said


def test_a_config_that_raises_is_refused_in_one_line(tmp_path, monkeypatch):
    """This one reads settings that SGLang has only in its workers."""
    InklingMMConfig(architectures=["InklingForConditionalGeneration"]).save_pretrained(tmp_path)
    said = refused_alike(str(tmp_path), monkeypatch)
    assert "reading its configuration failed (ValueError: " in said
    assert "\n" not in said


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
        (("--enable-hierarchical-cache",), "is not supported with sliding-window layers: pages of windows are not"),
        (("--disable-hybrid-swa-memory",), "windows need a pool of their own; drop it"),
        (("--tp", "2", "--ragged-fairkv", "split"), "changes the number of heads of all layers, and these keep theirs"),
    ],
)
def test_what_does_not_go_with_windowed_layers(tmp_path, flags, words):
    make_config(tmp_path, "Gemma3Text", "Gemma3ForCausalLM", HYBRID[3][2] | {"layer_types": WINDOWED})
    assert words in refusal(tmp_path, "--kv-pool", "ragged", *flags)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_chunk_size": 64}, "attend to chunks"),
        ({"is_hybrid_swa_compress": True}, "heads of another shape"),
        ({"swa_head_dim": 32}, "heads of another shape"),
        ({"is_hybrid_swa": True, "swa_attention_layer_ids": [1]}, r"SGLang takes layers \[1\] .* lists \[0, 2\]"),
        (
            {"layer_types": ["full_attention", "some_attention"]},
            "of another kind than full and sliding attention: some_",
        ),
    ],
)
def test_windows_of_another_sort_are_refused(tmp_path, monkeypatch, changes, reason):
    model_config = load_model_config_of(tmp_path, *HYBRID[3][:2], HYBRID[3][2] | {"layer_types": WINDOWED})
    refuse_model(model_config)
    for name, value in changes.items():
        holder = model_config.hf_text_config if name == "layer_types" else model_config
        monkeypatch.setattr(holder, name, value)
    with pytest.raises(RaggedConfigError, match=reason):
        refuse_model(model_config)


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


MEDIA_SIZES = SIZES | {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}}


def media_config(folder, name, architecture, more):
    config_class = getattr(transformers, f"{name}Config")
    config_class(architectures=[architecture], text_config=MEDIA_SIZES | more).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "architecture", "reason"),
    [
        ("Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", None),
        ("Qwen3VL", "Qwen3VLForConditionalGeneration", None),
        ("Mistral3", "Mistral3ForConditionalGeneration", None),
        ("Gemma3", "Gemma3ForConditionalGeneration", "both directions"),
        ("Llava", "LlavaForConditionalGeneration", "have not been tested"),
        ("Cohere2Vision", "Cohere2VisionForConditionalGeneration", "have not been tested"),
    ],
)
def test_models_that_take_pictures(tmp_path, name, architecture, reason):
    model_config = load_model_config(media_config(tmp_path, name, architecture, {}))
    # SGLang leaves the pictures of some models out unless --enable-multimodal is given.
    model_config.is_multimodal = True
    found = media_reason(model_config, architecture)
    assert found is None if reason is None else reason in found
    model_config.is_multimodal = False
    assert media_reason(model_config, architecture) is None


def test_an_untested_model_with_pictures_is_refused_in_one_line(tmp_path, monkeypatch):
    model = str(media_config(tmp_path, "Llava", "LlavaForConditionalGeneration", {}))
    said = refusal(model, "--kv-pool", "ragged").removeprefix("sgl_ragged: ")
    assert said.startswith("LlavaForConditionalGeneration cannot be served with --kv-pool ragged: multimodal models")
    monkeypatch.setattr(sys, "argv", ["sgl-ragged", "layout", "--model", model, "--kv-bytes", "1GiB"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == f"sgl-ragged: {said}"


def test_one_position_per_token_is_not_m_rope(tmp_path, monkeypatch):
    """expected_attention turns keys by their place in the sequence: server, layout and calibration refuse it alike."""
    model = str(media_config(tmp_path, "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", MROPE))
    said = refusal(model, "--kv-pool", "ragged", "--ragged-scorer", "expected_attention", "--ragged-profile", "uniform")
    assert "expected_attention" in said
    assert "M-RoPE" in said
    resolved(model, "--kv-pool", "ragged", "--ragged-scorer", "snapkv", "--ragged-profile", "uniform")
    layout = ["sgl-ragged", "layout", "--model", model, "--kv-bytes", "1GiB", "--scorer", "expected_attention"]
    monkeypatch.setattr(sys, "argv", layout)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == said.replace("sgl_ragged: ", "sgl-ragged: ", 1)
    calibration = ["calib", "run", "--model", model, "--scorer", "expected_attention", "-o", str(tmp_path / "p")]
    monkeypatch.setattr(sys, "argv", calibration)
    with pytest.raises(SystemExit) as ended:
        calibrate()
    assert "M-RoPE" in str(ended.value.code)


@pytest.mark.parametrize("nested", [True, False])
def test_everyone_sees_the_same_language_model(tmp_path, nested):
    """Of configs with a part of its own for the language model, and of older ones, which have it all on one level."""
    media_config(tmp_path, "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", MROPE)
    path = tmp_path / "config.json"
    if not nested:
        config = json.loads(path.read_text())
        text = {name: value for name, value in config.pop("text_config").items() if name != "model_type"}
        path.write_text(json.dumps(text | config | {"model_type": "qwen2_5_vl"}))
    served = model_geometry(load_model_config(tmp_path))
    assert (served.num_layers, served.num_heads, served.q_per_kv, served.head_dim) == (4, 2, 2, 64)
    assert read_sizes(tmp_path, lambda config: ModelGeometry.from_config(config, served.name)) == served
    assert ModelGeometry.from_config(json.loads(path.read_text()), served.name) == served
    assert model_geometry(read_config(str(tmp_path), {})) == served


def test_models_around_the_same_language_model_differ(tmp_path):
    """A profile of one does not fit the other: their pictures are embedded by other networks."""
    names = [("Qwen2VL", "Qwen2VLForConditionalGeneration"), ("Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration")]
    prints = {
        model_geometry(load_model_config(media_config(tmp_path / name, name, arch, MROPE))).fingerprint
        for name, arch in names
    }
    assert len(prints) == 2
