"""The CUDA graphs that SGLang captures of a model over slabs.

Decode is captured as a whole step. Prefill is captured only if the flags ask for it, with breaks at attention: the
backend is called between the parts with the batch that runs, so its tensors may differ from the capture.
"""

from __future__ import annotations

from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.options import RaggedOptions

DISABLED, BREAKABLE = "disabled", "breakable"
"""SGLang's names for no CUDA graphs, and for those of prefill that break at attention."""

CAPTURED_KERNELS = ("auto", "triton")
"""Values of --ragged-kernel that go with CUDA graphs: the torch operations loop over bands on the host, and FlashInfer
plans there."""


def asked_graphs(server_args: Any) -> dict[str, str | None]:
    """Return the kind of CUDA graphs in the flags by SGLang's name of the phase; None if it is not given."""
    from sglang.srt.model_executor.cuda_graph_config import Phase

    asked = {
        Phase.PREFILL: server_args.cuda_graph_backend_prefill,
        Phase.DECODE: server_args.cuda_graph_backend_decode,
    }
    for phase, given in (server_args.cuda_graph_config or {}).items():
        asked[phase] = given.get("backend", asked.get(phase))
    return asked


def captures_prefill(server_args: Any) -> bool:
    """True if graphs of prefill are asked for."""
    from sglang.srt.model_executor.cuda_graph_config import Phase

    return asked_graphs(server_args)[Phase.PREFILL] not in (None, DISABLED)


def refuse_graphs(server_args: Any, options: RaggedOptions) -> None:
    """Raise RaggedConfigError for graphs that cannot be captured with these options."""
    from sglang.srt.model_executor.cuda_graph_config import Phase

    asked = asked_graphs(server_args)
    for phase, name in ((Phase.PREFILL, "prefill"), (Phase.DECODE, "decode")):
        if asked[phase] not in (None, DISABLED) and options.kernel not in CAPTURED_KERNELS:
            raise RaggedConfigError(
                f"CUDA graphs of {name} are not supported with --ragged-kernel {options.kernel}; drop the flag, or use "
                f"--ragged-kernel triton"
            )
    if asked[Phase.PREFILL] not in (None, DISABLED, BREAKABLE):
        raise RaggedConfigError(
            f"CUDA graphs of prefill are supported with --kv-pool ragged where they break at attention, not as "
            f"{asked[Phase.PREFILL]!r}; use {BREAKABLE!r}, or drop the flag"
        )


def declared_graphs(server_args: Any, options: RaggedOptions) -> dict[str, str]:
    """Return settings to declare before SGLang sizes memory, since it reserves memory for graphs."""
    declared = {} if options.kernel in CAPTURED_KERNELS else {"cuda_graph_backend_decode": DISABLED}
    return declared | {"cuda_graph_backend_prefill": BREAKABLE if captures_prefill(server_args) else DISABLED}


def settled_graphs(config: Any, server_args: Any, *, captured: bool) -> Any:
    """Return SGLang's graph configuration with the graphs that are captured.

    Args:
        captured: True if kernels and device support graphs.

    Raises RaggedConfigError for graphs of decode that are not over the whole step, and for asked ones of prefill where
    there are none.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    if captures_prefill(server_args) and not captured:
        raise RaggedConfigError(
            "CUDA graphs of prefill need a CUDA device and --ragged-kernel triton with --kv-pool ragged; drop the flag"
        )
    of_prefill = Backend.BREAKABLE if captures_prefill(server_args) else Backend.DISABLED
    config = with_phase(config, Phase.PREFILL, backend=of_prefill)
    if not captured:
        return with_phase(config, Phase.DECODE, backend=Backend.DISABLED)
    if config[Phase.DECODE].backend not in (Backend.FULL, Backend.DISABLED):
        raise RaggedConfigError(
            f"CUDA graphs of kind {config[Phase.DECODE].backend!r} are not supported with --kv-pool ragged for decode; "
            f"use {Backend.FULL!r} or {Backend.DISABLED!r}"
        )
    return config
