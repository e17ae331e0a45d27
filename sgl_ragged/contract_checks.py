"""Compare the installed SGLang with `sglang_contract`, and wrap its functions.

SGLang logs errors of hooks and goes on. Here it is an error if a function has other parameters than the contract lists,
or was not wrapped.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.sglang_contract import RELEASES, REMEDY, Functions


def resolve(target: str) -> object | None:
    """Return the object at a dotted path, or None; of a class method the function itself."""
    try:
        found = pkgutil.resolve_name(target)
    except (AttributeError, ImportError, ValueError):
        return None
    # A bound method is a new object each time: comparing identities would always see a change.
    return getattr(found, "__func__", found)


def installed_release() -> str:
    """Return the version of the installed SGLang; RaggedConfigError if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise RaggedConfigError(f"SGLang is not installed; {REMEDY}") from None


def is_tested(release: str) -> bool:
    """True for a version of SGLang in RELEASES, or a post release of one; False for pre-releases."""
    version = Version(release)
    return version.base_version in RELEASES and not version.is_prerelease


def check_contract(functions: Functions, needed_for: str = "") -> None:
    """Compare the installed release and the parameters of functions with the contract.

    Args:
        functions: a group of `sglang_contract`.
        needed_for: words for the message, such as " with --flag"; empty for what every server needs.

    Raises:
        RaggedConfigError: the release is another one, or functions are missing or take other parameters.
    """
    release = installed_release()
    wrong = [] if is_tested(release) else [f"a server was tested with {' and '.join(RELEASES)} alone"]
    for target, parameters in functions.items():
        function = resolve(target)
        if not callable(function):
            wrong.append(f"{target} (missing)")
            continue
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            wrong.append(f"{target} (takes {', '.join(found)})")
    if wrong:
        raise RaggedConfigError(f"SGLang {release} is not supported{needed_for}: {'; '.join(wrong)}; {REMEDY}")


def wrap(hooks: Sequence[tuple[str, Callable]]) -> None:
    """Wrap functions of SGLang in this process.

    Args:
        hooks: dotted paths and what wraps them; a hook takes the original function first.

    Raises:
        RaggedConfigError: a function was not wrapped.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    originals = {target: resolve(target) for target, _ in hooks}
    source = HookSource(plugin_name="sgl_ragged", dist_name="sgl-ragged")
    for target, hook in hooks:
        if not _wrap_method(target, hook):
            HookRegistry.register(target, hook, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()
    lost = [target for target, original in originals.items() if resolve(target) is original]
    if lost:
        raise RaggedConfigError(f"hooks did not take effect: {', '.join(lost)}")


def replace_class(target: str, replacement: type) -> None:
    """Put a subclass in the place of a class of SGLang, wherever it was imported.

    Raises:
        RaggedConfigError: the class was not replaced.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, replacement, HookType.REPLACE)
    HookRegistry.apply_hooks()
    if resolve(target) is not replacement:
        raise RaggedConfigError(f"{target} of SGLang was not replaced; {REMEDY}")


def _wrap_method(target: str, hook: Callable) -> bool:
    """Wrap a method in its class; returns False if the target is no plain function that a class defines itself.

    The registry searches all loaded modules for other names of a function, 40 ms each. Methods have none.
    """
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = vars(owner).get(name) if isinstance(owner, type) else None
    if not inspect.isfunction(original):
        return False

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return True
