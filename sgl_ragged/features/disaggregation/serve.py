"""Where pages of two servers meet SGLang's PD disaggregation."""

from __future__ import annotations

from sgl_ragged.launch.feature import Seam

_SGLANG = "sglang.srt.disaggregation"
_QUEUE = f"{_SGLANG}.decode.DecodePreallocQueue"
_SENDER = f"{_SGLANG}.common.conn.CommonKVSender"
_PREFILL, _DECODE = (
    "sgl_ragged.features.disaggregation.prefill_server",
    "sgl_ragged.features.disaggregation.decode_server",
)

SEAMS = (
    Seam(
        f"{_SGLANG}.utils.setup_state_kv_args",
        ("kv_args", "token_to_kv_pool", "draft_token_to_kv_pool", "total_kv_layers", "req_to_token_pool"),
        f"{_PREFILL}.describe_memory",
    ),
    Seam(
        f"{_SGLANG}.prefill.PrefillBootstrapQueue.create_sender",
        ("self", "req", "num_kv_heads"),
        f"{_PREFILL}.send_open_pages",
    ),
    Seam(
        f"{_SGLANG}.nixl.conn.NixlKVManager._add_remote_peer",
        ("self", "decode_kv_args"),
        f"{_PREFILL}.refuse_other_pools",
    ),
    Seam(f"{_SENDER}.init", ("self", "num_kv_indices", "aux_index")),
    Seam(f"{_SENDER}.send", ("self", "kv_indices", "state_indices", "num_kv_tokens", "indices_event")),
    Seam(f"{_SGLANG}.decode.DecodeReqToTokenPool.free", ("self", "req"), f"{_DECODE}.free_row"),
    Seam(
        f"{_QUEUE}._pre_alloc",
        ("self", "req", "prefix_indices", "prefix_len", "total_prefix_len"),
        f"{_DECODE}.allocate",
    ),
    Seam(f"{_QUEUE}._required_alloc_tokens", ("self", "fill_len", "prefix_len"), f"{_DECODE}.needed_tokens"),
    Seam(f"{_QUEUE}._prealloc_required_tokens", ("self", "req"), f"{_DECODE}.needed_again"),
    Seam(f"{_QUEUE}._pre_alloc_fill_len", ("req",)),
    Seam(f"{_QUEUE}._check_if_req_exceed_kv_capacity", ("self", "req"), f"{_DECODE}.refuse_what_never_fits"),
    Seam(
        f"{_QUEUE}._transfer_page_indices", ("self", "decode_req", "kv_indices", "page_size"), f"{_DECODE}.destinations"
    ),
    Seam(f"{_QUEUE}._ensure_prefill_info", ("self", "addr_to_reqs"), f"{_DECODE}.agree_first"),
)
