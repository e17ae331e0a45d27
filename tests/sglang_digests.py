"""`make digests`: record the digests of SGLang's functions that the plugin needs, as installed.

`sgl-ragged check` and starts on releases that were not tested compare with them.
"""

from __future__ import annotations

import json

from sgl_ragged.contract_checks import DIGESTS, installed_release, is_tested, resolve
from sgl_ragged.launch.feature import contracts
from sgl_ragged.sglang_contract import RELEASES
from sgl_ragged.source_digest import source_digest


def installed_digests() -> dict[str, str]:
    """Digests by dotted path, sorted. RaggedConfigError or AssertionError if a function or its source is missing."""
    digests = {}
    for target in sorted({target for functions in contracts().values() for target in functions}):
        function = resolve(target)
        assert callable(function), f"SGLang has no {target}"
        digest = source_digest(function)
        assert digest is not None, f"{target} has no source in Python"
        digests[target] = digest
    return digests


def main() -> None:
    release = installed_release()
    assert is_tested(release), f"SGLang {release} is installed: add it to RELEASES first, which has {RELEASES}"
    digests = installed_digests()
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{DIGESTS.name}: {len(digests)} functions of SGLang {release}")


if __name__ == "__main__":
    main()
