"""Settings that follow from --kv-pool ragged, and the reasons to refuse it. Runs in the launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ragged.attention.kernel_choice import choose_kernel
from sgl_ragged.attention.kernels.tiles import check_shape
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.plugin.options import ATTRIBUTE, RaggedOptions
from sgl_ragged.plugin.seams import BACKEND, check_seams, seams_for


def resolve_with_options(original: Callable[[Any], None], server_args: Any, options: RaggedOptions) -> None:
    """Run SGLang's own resolution with the plugin's settings declared, check what came out, place the heads.

    The options that the workers are to follow replace those on the record.

    Raises:
        RaggedConfigError: the combination cannot be honoured; nothing has been started yet.
    """
    check_seams(seams_for(options))
    if not options.ragged:
        return original(server_args)

    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    refuse_flags(server_args, options)
    declare_resolution(server_args, "sgl_ragged", page_size=options.segment, attention_backend=BACKEND)
    original(server_args)
    view = resolving_view(server_args)
    kernel = choose_kernel(options.kernel, view.device)
    graphs = _cuda_graphs(view.cuda_graph_config, in_decode=kernel == "triton" and view.device == "cuda")
    declare_resolution(server_args, "sgl_ragged", cuda_graph_config=graphs)
    if view.chunked_prefill_size > 0:
        # SGLang's default need not be whole segments; what the user gave is checked by refuse_flags.
        chunk = max(view.chunked_prefill_size // options.segment, 1) * options.segment
        declare_resolution(server_args, "sgl_ragged", chunked_prefill_size=chunk)
    for name, wanted in (("attention_backend", BACKEND), ("page_size", options.segment)):
        found = getattr(view, name)
        if found != wanted:
            raise RaggedConfigError(
                f"SGLang set {name} to {found!r} for this model or flag combination, --kv-pool ragged needs {wanted!r}"
            )
    model_config = model_config_of(server_args)
    refuse_model(model_config)
    from sgl_ragged.plugin.model_layout import model_geometry, model_statistics
    from sgl_ragged.plugin.placing import model_overrides, place_heads, refuse_ranks, require_places

    geometry = model_geometry(model_config)
    refuse_ranks(options, view.tp_size, geometry)
    if kernel != "torch":
        check_shape(geometry.head_dim, geometry.q_per_kv)
    model_statistics(options, geometry)
    options = place_heads(options, view, model_config, geometry, kernel)
    setattr(server_args, ATTRIBUTE, options)
    overrides = model_overrides(options, view.json_model_override_args)
    if overrides is not None:
        declare_resolution(server_args, "sgl_ragged", json_model_override_args=overrides)
        # The config that was built without them; whoever asks next builds it anew.
        server_args._model_config = None
        require_places(options, model_geometry(model_config_of(server_args)))


def _cuda_graphs(config: Any, *, in_decode: bool) -> Any:
    """The graphs that can be captured: none of prefill, of decode those over the whole step.

    The torch operations loop over bands on the host, FlashInfer plans on the host, prefill allocates by its lengths.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)
    if not in_decode:
        return with_phase(config, Phase.DECODE, backend=Backend.DISABLED)
    if config[Phase.DECODE].backend not in (Backend.FULL, Backend.DISABLED):
        raise RaggedConfigError(
            f"CUDA graphs of kind {config[Phase.DECODE].backend!r} are not supported with --kv-pool ragged for decode; "
            f"use {Backend.FULL!r} or {Backend.DISABLED!r}"
        )
    return config


_FORBIDDEN_FLAGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # field, values that are fine, reason
    ("attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop --attention-backend"),
    ("prefill_attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop the flag"),
    ("decode_attention_backend", (None,), "the attention backend follows from --kv-pool ragged; drop the flag"),
    ("speculative_algorithm", (None,), "speculative decoding is not supported with --kv-pool ragged; drop it"),
    ("disaggregation_mode", ("null",), "prefill/decode disaggregation is not supported with --kv-pool ragged"),
    ("enable_hierarchical_cache", (False,), "host tiers of the KV cache are not supported with --kv-pool ragged"),
    ("enable_lmcache", (False,), "LMCache is not supported with --kv-pool ragged"),
    ("enable_flexkv", (False,), "FlexKV is not supported with --kv-pool ragged"),
    ("enable_memory_saver", (False,), "releasing KV memory at run time is not supported with --kv-pool ragged"),
    ("kv_canary", (None, "none"), "the KV canary reads single tokens, which --kv-pool ragged does not store"),
    ("enable_unified_memory", (False,), "the unified memory pool is not supported with --kv-pool ragged"),
    ("enable_page_major_kv_layout", (False,), "the page-major layout is not supported with --kv-pool ragged"),
    ("enable_streaming_session", (False,), "streaming sessions are not supported with --kv-pool ragged"),
    ("enable_hisparse", (False,), "HiSparse is not supported with --kv-pool ragged"),
    ("enable_kv_cache_sharding", (False,), "KV cache sharding is not supported with --kv-pool ragged"),
    ("enable_two_batch_overlap", (False,), "two-batch overlap is not supported with --kv-pool ragged"),
    ("enable_pdmux", (False,), "PD multiplexing is not supported with --kv-pool ragged"),
    ("prefill_only_disable_kv_cache", (False,), "--prefill-only-disable-kv-cache leaves no KV cache to compress"),
    ("pp_size", (1,), "pipeline parallelism is not supported with --kv-pool ragged; use --tp"),
    ("dcp_size", (1,), "decode context parallelism is not supported with --kv-pool ragged; use --tp"),
    ("attn_cp_size", (1,), "context parallelism is not supported with --kv-pool ragged; use --tp"),
    ("attn_dp_size", (None, 1), "attention data parallelism is not supported with --kv-pool ragged; use --tp"),
    ("enable_dp_attention", (False,), "attention data parallelism is not supported with --kv-pool ragged; use --tp"),
    ("dllm_algorithm", (None,), "diffusion language models are not supported with --kv-pool ragged"),
    (
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "float16", "fp16", "float32"),
        "a quantised KV cache is not supported with --kv-pool ragged; use --kv-cache-dtype auto",
    ),
)


def refuse_flags(server_args: Any, options: RaggedOptions) -> None:
    """Raise RaggedConfigError for the first SGLang flag that does not go with --kv-pool ragged."""
    if server_args.page_size not in (None, options.segment):
        raise RaggedConfigError(
            f"--page-size {server_args.page_size} differs from the segment length {options.segment}: a page is a "
            f"segment; drop --page-size, or set --ragged-segment"
        )
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % options.segment:
        raise RaggedConfigError(
            f"--chunked-prefill-size {chunk} is not a multiple of the segment length {options.segment}: "
            f"set it to {max(chunk // options.segment, 1) * options.segment}, or drop it"
        )
    for name, fine, reason in _FORBIDDEN_FLAGS:
        value = getattr(server_args, name, fine[0])
        if value not in fine:
            raise RaggedConfigError(f"{reason} ({name} is {value!r})")


def refuse_model(model_config: Any) -> None:
    """Raise RaggedConfigError for a model whose attention is not plain causal MHA/GQA in every layer.

    Args:
        model_config: SGLang's ModelConfig.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

    name = (model_config.hf_config.architectures or ["this model"])[0]
    reasons = (
        (
            model_config.attention_arch == AttentionArch.MLA,
            "MLA attention keeps one latent per token, not one per head",
        ),
        (mambaish_config(model_config) is not None, "its state-space or linear-attention layers have no KV cache"),
        (bool(getattr(model_config, "is_hybrid_swa", False)), "its sliding-window layers have a pool of their own"),
        (is_minimax_sparse(model_config.hf_config), "its sparse attention indexes single tokens"),
        (model_config.is_encoder_decoder, "cross-attention is not supported"),
        (model_config.is_multimodal, "multimodal models have not been tested"),
        (model_config.head_dim != model_config.v_head_dim, "keys and values have different head dimensions"),
    )
    for applies, reason in reasons:
        if applies:
            raise RaggedConfigError(f"{name} cannot be served with --kv-pool ragged: {reason}; use --kv-pool token")
