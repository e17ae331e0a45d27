"""Compare the installed SGLang with `sglang_contract`, and wrap its functions.

SGLang logs errors of hooks and goes on. Here it is an error if a function has other parameters than the contract lists,
or was not wrapped.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import logging
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.sglang_contract import RELEASES, REMEDY, Functions
from sgl_ragged.source_digest import source_digest

DIGESTS = Path(__file__).with_name("sglang_digests.json")
"""Digest of each function of the contract in the last of RELEASES, by dotted path; `make digests` writes it."""

SAME = "same"
OTHER_SOURCE = "other source"
OTHER_PARAMETERS = "other parameters"
MISSING = "missing"
STATES = (SAME, OTHER_SOURCE, OTHER_PARAMETERS, MISSING)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seam:
    """One function of the contract, compared with the installed SGLang.

    target: dotted path. state: one of STATES.
    parameters: of the installed function; empty if it is missing.
    """

    target: str
    state: str
    parameters: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """False if the function cannot be wrapped, overridden or called as the plugin does."""
        return self.state in (SAME, OTHER_SOURCE)

    def __str__(self) -> str:
        if self.state == OTHER_PARAMETERS:
            return f"{self.target} (takes {', '.join(self.parameters)})"
        return f"{self.target} ({self.state})"


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
    """True for a version of SGLang in RELEASES; a local part such as +cu130 does not count."""
    return Version(release).public in RELEASES


def compare(functions: Functions, *, sources: bool = True) -> list[Seam]:
    """Compare functions with the installed SGLang, in the order of the contract.

    Args:
        functions: a group of `sglang_contract`, or of a feature of another package, whose sources are not recorded.
        sources: False to compare parameters alone, which is faster.
    """
    digests: dict[str, str] = json.loads(DIGESTS.read_text()) if sources else {}
    return [_compare_one(target, parameters, digests.get(target)) for target, parameters in functions.items()]


def _compare_one(target: str, parameters: tuple[str, ...] | None, digest: str | None) -> Seam:
    function = resolve(target)
    if not callable(function):
        return Seam(target, MISSING)
    found = tuple(inspect.signature(function).parameters)
    if parameters is not None and found != parameters:
        return Seam(target, OTHER_PARAMETERS, found)
    changed = digest is not None and source_digest(function) != digest
    return Seam(target, OTHER_SOURCE if changed else SAME, found)


def check_contract(functions: Functions, needed_for: str = "") -> None:
    """Compare the parameters of the installed SGLang's functions with the contract.

    Args:
        functions: a group of `sglang_contract`.
        needed_for: words for the message, such as " with --flag"; empty for what every server needs.

    Raises:
        RaggedConfigError: functions are missing or take other parameters; the message lists them.
    """
    wrong = [seam for seam in compare(functions, sources=False) if not seam.fits]
    if wrong:
        listed = "; ".join(map(str, wrong))
        raise RaggedConfigError(f"SGLang {installed_release()} is not supported{needed_for}: {listed}; {REMEDY}")


def warn_if_untested(groups: Iterable[Functions]) -> None:
    """Log one warning if the installed release is not in RELEASES: it names the functions whose source differs.

    Args:
        groups: all groups of functions that this server needs; they passed `check_contract`.
    """
    release = installed_release()
    if is_tested(release):
        return
    functions: Functions = {target: names for group in groups for target, names in group.items()}
    changed = [seam.target for seam in compare(functions) if seam.state == OTHER_SOURCE]
    differing = f"{len(changed)} have another source: {', '.join(changed)}" if changed else "none has changed"
    logger.warning(
        "SGLang %s was not tested with this plugin (%s was); of the %d functions that this server needs, %s. Compare "
        "answers before you rely on them: sgl-ragged verify",
        *(release, RELEASES[-1], len(functions), differing),
    )


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
