"""Entry point `sglang.srt.plugins`: the few hooks that every SGLang process has.

They add the flags, and carry the options from the launcher to the workers. All other hooks are installed by
`serve.hooks`, only with --kv-pool ragged or --kv-bytes: without these flags the server runs SGLang's own code. SGLang
logs and swallows errors of plugins, so the hooks check each other: the flag hook refuses to offer flags that the others
could not honour.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from sgl_ragged.contract_checks import installed_release, resolve
from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.command_line import OBSERVER, add_flags, all_flags, make_options
from sgl_ragged.launch.options import RaggedOptions
from sgl_ragged.launch.plan import ATTRIBUTE, WorkerSettings
from sgl_ragged.serve.refusal import end_worker
from sgl_ragged.sglang_contract import REMEDY

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_PUBLISH = "sglang.srt.runtime_context.publish"

_hooked: list[tuple[str, object]] = []


def register() -> None:
    """Register the hooks. SGLang calls this once in every process, before it parses arguments."""
    from sglang.srt.plugins.hook_registry import HookType

    _hook(f"{_SERVER_ARGS}.add_cli_args", _add_flags, HookType.AFTER)
    _hook(f"{_SERVER_ARGS}.from_cli_args", _from_cli_args, HookType.AROUND)
    _hook(f"{_SERVER_ARGS}.resolve_once", _resolve_once, HookType.AROUND)
    _hook(_PUBLISH, _install_in_worker, HookType.BEFORE)
    extend_engine()


def extend_engine() -> None:
    """Let `Engine` take the flags as keywords, if its module is loaded.

    Engine.__init__ loads plugins before it reads this class attribute; in other processes the import would be for
    nothing.
    """
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.Engine.server_args_class = staticmethod(_server_args_from_kwargs)


def _hook(target: str, hook: Callable, hook_type: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    _hooked.append((target, resolve(target)))
    HookRegistry.register(target, hook, hook_type)


def _refuse_unless_hooked() -> None:
    lost = [target for target, original in _hooked if original is None or resolve(target) is original]
    if lost:
        raise RaggedConfigError(f"could not hook {', '.join(lost)} of SGLang {installed_release()}; {REMEDY}")


def _add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    try:
        add_flags(parser)
    except RaggedConfigError as error:
        raise SystemExit(f"sgl_ragged: {error}") from None


def _from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    given = {name: getattr(args, name, None) for name in all_flags()}
    try:
        options = make_options(given, from_command_line=True)
        if options is not None:
            _refuse_unless_hooked()
    except RaggedConfigError as error:
        raise SystemExit(f"sgl_ragged: {error}") from None
    return _attach(original(cls, args), options)


def _server_args_from_kwargs(**kwargs: Any) -> Any:
    """`Engine(kv_pool="ragged", ...)`: the plugin's keyword arguments are named like its flags."""
    from sglang.srt.server_args import ServerArgs

    observer = kwargs.pop(OBSERVER, None)
    given = {name: kwargs.pop(name, None) for name in all_flags()}
    options = make_options(given, from_command_line=False, observer=observer)
    if options is not None:
        _refuse_unless_hooked()
    return _attach(ServerArgs(**kwargs), options)


def _attach(server_args: Any, options: RaggedOptions | None) -> Any:
    if options is not None:
        setattr(server_args, ATTRIBUTE, options)
    return server_args


def _resolve_once(original: Callable, server_args: Any) -> None:
    options = getattr(server_args, ATTRIBUTE, None)
    if not isinstance(options, RaggedOptions) or getattr(server_args, "_resolution_finished", False):
        return original(server_args)
    from sgl_ragged.launch.resolution import resolve_with_options

    try:
        resolve_with_options(original, server_args, options)
    except RaggedConfigError as error:
        if options.from_command_line:
            raise SystemExit(f"sgl_ragged: {error}") from None
        raise


def _install_in_worker(server_args: Any, *, role: str, **_: Any) -> None:
    serving = getattr(server_args, ATTRIBUTE, None)
    if isinstance(serving, WorkerSettings) and role == "tokenizer" and serving.check is not None:
        from sgl_ragged.serve.start_check import install as install_check

        install_check(serving.check)
    if isinstance(serving, WorkerSettings) and role in ("scheduler", "dp_controller"):
        from sgl_ragged.serve.hooks import install, install_in_controller

        try:
            (install if role == "scheduler" else install_in_controller)(serving)
        except RaggedConfigError as error:
            end_worker(error, serving.from_command_line, rank=0)
