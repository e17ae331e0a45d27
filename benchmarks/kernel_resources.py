"""Registers, shared memory and spills of the Triton kernels, compiled for GPUs that this machine need not have.

    python -m benchmarks kernel_resources [--json] [--output benchmarks/results/kernel-resources.md]

It takes two to three minutes.

Compiles every kernel for every architecture and dtype and for some head dimensions, and reads what the assembler made
of it. No GPU is used, so this says what a kernel needs, not how fast it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.harness.options import new_parser
from sgl_ragged.attention.kernels import (
    append,
    decode,
    describe,
    extend,
    fit,
    gate,
    primitives,
    quantize_fp8,
    row_copy,
    row_moments,
    seal,
    tiles,
    write_codes,
)
from sgl_ragged.mem_pool import slab_format

ARCHITECTURES = (80, 90, 100)
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
FP8 = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
"""Caches narrower than the queries, which are bf16 then; and the largest number of each. fp8e4nv is E4M3."""
CODES = {
    name: slab_format.FORMATS[name] for name in ("int8", "k8v4", "k6v6", "k6v4", "k5v5", "k5v4", "k4v4", "k4v3", "k3v3")
}
"""Formats of slabs in codes, beside open segments and queries in bf16: those that `auto` chooses, and every width."""
SEALED = (seal.gather_kernel, row_moments.row_moments_kernel)
"""Kernels that differ where slabs are of codes, beside attention."""
HEAD_DIMS, PADDED_DIMS = (64, 128, 256), (80, 96)
"""Powers of two, whose tiles are as wide as rows; others, whose tiles are those of the next power of two."""
HEADS, Q_PER_KV, SEGMENT = 8, 4, 256
TOKENS = 76
"""Of an open segment in a page: no power of two, and no divisor of the segment, as in general."""
FEATURES = 128
"""Of gates, as calibration trains them."""
CODED_QUERIES = 84
"""Of codebooks, as calibration records them."""
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Build:
    """One kernel to be compiled. `types`: Triton type of each parameter that is not a constant, in order."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    dtype: str
    head_dim: int
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs. Registers per thread; shared and spilled bytes per CTA and thread.

    `wide_loads`: 16-byte loads and asynchronous copies among the machine instructions; `async_depth`: most copies that
    a wait leaves in flight, 0 where nothing is pipelined; `tensor_core`: the matrix instruction, if any.
    """

    kernel: str
    architecture: int
    dtype: str
    head_dim: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    wide_loads: int
    narrow_loads: int
    async_depth: int
    tensor_core: str
    tile: str


def head_dims(dtype: str) -> tuple[int, ...]:
    """Those that a dtype is compiled for. Of rows narrower than their tiles, bf16 stands for fp16."""
    return HEAD_DIMS if dtype == "fp16" else tuple(sorted(HEAD_DIMS + PADDED_DIMS))


def builds(architecture: int) -> Iterator[Build]:
    """Every kernel with every dtype and its head dimensions, for a compute capability times ten."""
    for dtype in ITEMSIZE:
        for dim in head_dims(dtype):
            yield from _attention_builds(dtype, dim, architecture)
            # What only moves or scores rows is compiled alike for both 16-bit dtypes.
            if dtype != "fp16":
                yield from _storage_builds(dtype, dim)
    for dtype in FP8:
        # Before 8.9 the machine cannot convert E4M3, nor does Triton (`kernel_choice.check_cache`).
        for dim in head_dims(dtype) if dtype == "fp8e5" or architecture >= 89 else ():
            yield from _attention_builds(dtype, dim, architecture)
            yield from _storage_builds(dtype, dim)
    for dtype in CODES:
        for dim in head_dims(dtype):
            yield from _attention_builds(dtype, dim, architecture)
            yield from (one for one in _storage_builds(dtype, dim) if one.kernel in SEALED)
            yield _write_codes_build(dtype, dim)
    constants = {"SEGMENT": SEGMENT, "PADDED": SEGMENT, "BLOCK_J": 32}
    types = {"scores_ptr": "*fp32", "numbers_ptr": "*i32", "kept_ptr": "*i32", "positions_ptr": "*i32"}
    yield Build(seal.choose_kernel, types, constants, 4, "fp32", 0)
    words = {n: "*i32" if n.endswith("_ptr") else "i32" for n in row_copy.copy_rows_kernel.arg_names if not n.isupper()}
    for unit in row_copy.UNITS:
        label = "" if unit > 1 else "copy_rows of single words"
        constants = {"UNIT": unit, "BLOCK": row_copy.BLOCK_WORDS}
        yield Build(row_copy.copy_rows_kernel, words, constants, 8, "fp32", 0, label)
    types = {n: "*i32" if n.endswith("_ptr") else "i32" for n in describe.describe_kernel.arg_names if not n.isupper()}
    types |= dict.fromkeys(("rows_ptr", "lengths_ptr", "req_pool_indices_ptr"), "*i64")
    pages = _pages("bf16")["PAGES"]
    constants = {"SEGMENT": SEGMENT, "PAGES": pages, "PADDED_PAGES": 4, "BLOCK": describe.BLOCK_SLOTS}
    yield Build(describe.describe_kernel, types, constants, 4, "fp32", 0)
    chunks = describe.describe_chunks_kernel
    types = {n: "*i32" if n.endswith("_ptr") else "i32" for n in chunks.arg_names if not n.isupper()}
    constants = {"PAGES": pages, "PADDED_PAGES": 4, "BLOCK": describe.BLOCK_SEALS}
    yield Build(chunks, types | {"rows_ptr": "*i64"}, constants, 1, "fp32", 0)
    types = {n: "*fp32" if n.endswith("_ptr") else "i32" for n in gate.gate_kernel.arg_names if not n.isupper()}
    yield Build(gate.gate_kernel, types, {"FEATURES": FEATURES}, 1, "fp32", 0)
    yield from _fit_builds()


def _attention_builds(dtype: str, dim: int, architecture: int) -> Iterator[Build]:
    query_dtype = "bf16" if dtype in FP8 or dtype in CODES else dtype
    query, itemsize = f"*{query_dtype}", ITEMSIZE[query_dtype]
    element, slabs = (query, "*u8") if dtype in CODES else (f"*{dtype}", f"*{dtype}")
    common: dict[str, Any] = {"HEADS": HEADS, "Q_PER_KV": Q_PER_KV, **_pages(dtype), "HEAD_DIM": dim}
    form = CODES.get(dtype, slab_format.WIDE)
    common |= {"PARTIAL": False, "KEY_BITS": form.key_bits, "VALUE_BITS": form.value_bits, "CENTRED": form.centred}
    kernels = (
        (
            decode.decode_kernel,
            tiles.decode_tile(dim, itemsize, fp8=dtype in FP8, form=form),
            {"queries_ptr": query, "keys_ptr": query, "values_ptr": query, "slabs_ptr": slabs, "tails_ptr": element}
            | dict.fromkeys(("features_ptr", "gate_output_ptr", "inputs_ptr"), "*fp32")
            | {
                "slots_ptr": "*i32",
                "pages_ptr": "*i32",
                "seen_ptr": "*i32",
                "open_lengths_ptr": "*i32",
                "ctas_ptr": "*i32",
                "kept_ptr": "*i32",
            }
            | {
                "key_blocks_ptr": "*i64",
                "opens_ptr": "*i32",
                "partial_ptr": "*fp32",
                "lse_ptr": "*fp32",
                "scale": "fp32",
            },
        ),
        (
            extend.extend_kernel,
            tiles.extend_tile(dim, itemsize, architecture // 10, fp8=dtype in FP8, form=form),
            {"queries_ptr": query, "keys_ptr": element, "values_ptr": element, "slabs_ptr": slabs}
            | {"tails_ptr": element, "slots_ptr": "*i32", "pages_ptr": "*i32", "tiles_ptr": "*i32"}
            | {"ctas_ptr": "*i32", "kept_ptr": "*i32", "key_blocks_ptr": "*i64", "output_ptr": query}
            | {
                "opens_ptr": "*i32",
                "head_lse_ptr": "*fp32",
                "partial_ptr": "*fp32",
                "lse_ptr": "*fp32",
                "scale": "fp32",
            },
        ),
    )
    for kernel, tile, types in kernels:
        scales = ("value_scale", "key_reciprocal", "value_reciprocal")
        scales = tuple(name for name in scales if name in kernel.arg_names)
        if dtype in FP8:
            types |= dict.fromkeys(scales, "fp32")
        own = common | ({} if dtype in FP8 else dict.fromkeys(scales))
        if kernel is extend.extend_kernel:
            own["sinks_ptr"] = None
        strides = {name: "i32" for name in kernel.arg_names if name not in types | own and not name.isupper()}
        blocks: dict[str, Any] = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages}
        blocks["PRECISION"] = tile.precision
        if kernel is extend.extend_kernel:
            blocks |= {"DIVIDED": False, "LSE": False}
        else:
            blocks |= {"LARGEST": FP8.get(dtype), "FEATURES": FEATURES}
        options = {"maxnreg": tile.registers}
        yield Build(kernel, types | strides, own | blocks, tile.warps, dtype, dim, options=options)
        # Of heads divided among CTAs, one dtype stands for all: only what is done with the result differs.
        if kernel is extend.extend_kernel and dtype == "bf16":
            divided = own | blocks | {"DIVIDED": True}
            yield Build(kernel, types | strides, divided, tile.warps, dtype, dim, "extend in parts")


def _storage_builds(dtype: str, dim: int) -> Iterator[Build]:
    element, is_fp8 = f"*{dtype}" if dtype not in CODES else "*bf16", dtype in FP8
    form = CODES.get(dtype, slab_format.WIDE)
    pointers: dict[Any, list[str]] = {
        append.append_kernel: ["tails_ptr"] if is_fp8 else ["keys_ptr", "values_ptr", "tails_ptr"],
        seal.score_kernel: ["keys_ptr", "values_ptr"],
        seal.gather_kernel: ["keys_ptr", "values_ptr", "slabs_ptr"],
    }
    if form.centred:
        pointers[row_moments.row_moments_kernel] = ["keys_ptr"]
    if is_fp8:
        pointers[quantize_fp8.quantize_fp8_kernel] = ["stored_keys_ptr", "stored_values_ptr"]
    else:
        pointers |= {decode.combine_kernel: ["output_ptr"], extend.combine_tiles_kernel: ["output_ptr"]}
    others = {"scores_ptr": "*fp32", "partial_ptr": "*fp32", "lse_ptr": "*fp32"}
    others |= dict.fromkeys(("features_ptr", "inputs_ptr"), "*fp32")
    others |= {"key_blocks_ptr": "*i64", "head_lse_ptr": "*fp32", "keys_ptr": "*bf16", "values_ptr": "*bf16"}
    # Constants of caches that hold keys and values as they are.
    plain: dict[str, None] = {} if is_fp8 else {"key_reciprocal": None, "value_reciprocal": None}
    others |= {} if plain else {"key_reciprocal": "fp32", "value_reciprocal": "fp32"}
    plain["sinks_ptr"] = None
    for kernel, elements in pointers.items():
        types = {"output_ptr": "*fp32"} if kernel is append.append_kernel else {}
        for name in kernel.arg_names:
            if form.quantised and name == "slabs_ptr":
                types[name] = "*u8"
            elif name in elements:
                types[name] = element
            elif not name.isupper() and name not in plain and name not in types:
                types[name] = others.get(name, "*i32" if name.endswith("_ptr") else "i32")
        constants = {"HEADS": HEADS, "Q_PER_KV": Q_PER_KV, "SEGMENT": SEGMENT, **_pages(dtype), "HEAD_DIM": dim}
        constants |= {
            "SCORER": "keydiff",
            "BLOCK_T": seal.score_block(dim),
            "BLOCK_R": seal.gather_rows(form),
        }
        constants |= {
            "FEATURES": FEATURES,
            "LARGEST": FP8.get(dtype),
            "WIDTH": HEADS * dim,
            "BLOCK": quantize_fp8.MOST_BLOCK,
        } | plain
        constants |= {"KEY_BITS": form.key_bits, "VALUE_BITS": form.value_bits, "CENTRED": form.centred}
        constants["CODE_BYTES"] = form.code_bytes(dim)
        constants |= {"BLOCK_P": primitives.COMBINED_PARTS, "BLOCK_M": 128, "PARTIAL": False, "LSE": False}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        warps = 1 if kernel is append.append_kernel else 4
        if kernel is row_moments.row_moments_kernel:
            warps = row_moments.moments_warps(dim)
        options: dict[str, Any] = row_moments.OPTIONS if kernel is row_moments.row_moments_kernel else {}
        if kernel is seal.gather_kernel:
            options = {"maxnreg": seal.gather_registers(form, dim)}
        yield Build(kernel, types, constants, warps, dtype, dim, options=options)


def _write_codes_build(dtype: str, dim: int) -> Build:
    kernel, form = write_codes.write_codes_kernel, CODES[dtype]
    types = dict.fromkeys((name for name in kernel.arg_names if not name.isupper()), "i32")
    types |= dict.fromkeys(("keys_ptr", "values_ptr"), "*i8") | {"scales_ptr": "*fp16", "slabs_ptr": "*u8"}
    types |= dict.fromkeys(("heads_ptr", "slots_ptr", "first_ptr", "key_blocks_ptr"), "*i64") | {"kept_ptr": "*i32"}
    constants: dict[str, Any] = {"HEAD_DIM": dim, "BLOCK_R": write_codes.ROWS}
    constants |= {"KEY_BITS": form.key_bits, "VALUE_BITS": form.value_bits}
    if form.centred:
        types["moments_ptr"] = "*fp16"
    else:
        del types["moments_ptr"]
        constants["moments_ptr"] = None
    return Build(kernel, types, constants, 4, dtype, dim)


def _fit_builds() -> Iterator[Build]:
    """Kernels of fitting, whose numbers are float32 whatever the cache holds."""

    def types(kernel: Any, **others: str) -> dict[str, str]:
        names = [name for name in kernel.arg_names if not name.isupper()]
        given = {"ridge": "fp32"} | others
        return {name: given.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}

    tokens = SEGMENT
    block, tile = fit.weights_tile(tokens)
    weighed = {"QUERIES": CODED_QUERIES, "BLOCK": block, "TILE": tile}
    of_codes = types(fit.feed_back_kernel, codes_ptr="*i8")
    rounded = {"BITS": 4, "BLOCK_W": fit.ROUNDED_COLUMNS}
    yield Build(fit.feed_back_kernel, of_codes, rounded, 4, "fp32", 0)
    yield Build(fit.weights_kernel, types(fit.weights_kernel), weighed, 4, "fp32", 0)
    halves = dict.fromkeys(("queries_ptr", "across_ptr", "outputs_ptr"), "*fp16")
    seen = types(fit.seen_from_kernel, frequencies_ptr="*fp64", numbers_ptr="*i32", **halves)
    for dim in head_dims("fp32"):
        constants = {"SEGMENT": SEGMENT, "QUERIES": CODED_QUERIES, "HEAD_DIM": dim}
        yield Build(fit.seen_from_kernel, seen, constants, fit.seen_from_warps(dim), "fp32", dim)


def _pages(dtype: str) -> dict[str, int]:
    """Constants of open segments, whose keys and values take as many bytes as queries unless the cache is FP8."""
    return {
        "TOKENS": TOKENS,
        "PAGES": -(-SEGMENT // TOKENS),
        "UNIT": 16 // (1 if dtype in FP8 else ITEMSIZE.get(dtype, 2)),
    }


def compile_build(build: Build, architecture: int) -> Resources:
    """Compile for an architecture (compute capability times ten) and read the result."""
    unspecialised = {one.name for one in build.kernel.params if one.do_not_specialize}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(build.kernel.arg_names)
        if name in build.types
        and name not in unspecialised
        and (name.endswith("_ptr") or name.endswith(("stride", "elems", "start", "words")))
    }
    signature = {n: build.types.get(n, "constexpr") for n in build.kernel.arg_names}
    source = ASTSource(build.kernel, signature, build.constants, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": build.warps} | build.options
    )
    usage, code = _disassemble(compiled.asm["cubin"])
    waits = re.findall(r"async_wait[^\n]*num = (\d+)", compiled.asm["ttgir"])
    wide = len(re.findall(r"\b(?:LDG|LDGSTS)\.[A-Z0-9.]*128", code))
    every = len(re.findall(r"\b(?:LDG|LDGSTS)\.", code))
    cores = re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTCMMA|DMMA)\b", code)
    return Resources(
        kernel=build.label or build.kernel.__name__.removesuffix("_kernel"),
        architecture=architecture,
        dtype=build.dtype,
        head_dim=build.head_dim,
        registers=int(usage["REG"]),
        shared_bytes=int(compiled.metadata.shared),
        spilled_bytes=int(usage["STACK"]) + 4 * len(re.findall(r"\b(?:STL|LDL)\b", code)),
        wide_loads=wide,
        narrow_loads=every - wide,
        async_depth=max(map(int, waits), default=0),
        tensor_core=cores[0] if cores else "",
        tile=f"{build.constants['BLOCK_M']}x{build.constants['BLOCK_N']}" if "BLOCK_N" in build.constants else "",
    )


def _disassemble(cubin: bytes) -> tuple[dict[str, str], str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    return dict(re.findall(r"(\w+):(\d+)", usage.splitlines()[-1])), code


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([BINARIES / tool, *arguments], capture_output=True, text=True, check=True).stdout


def spills(found: list[Resources]) -> str:
    """Which kernels spill registers with the installed Triton, in one sentence."""
    spilled = [
        f"{one.kernel} {one.dtype} {one.head_dim} at {one.architecture / 10} ({one.spilled_bytes} bytes)"
        for one in found
        if one.spilled_bytes
    ]
    which = f"registers spill: {', '.join(spilled)}" if spilled else "no kernel spills a register"
    return f"With triton {triton.__version__} {which}."


def markdown(found: list[Resources]) -> str:
    """The page of results: one row per kernel, dtype and head dimension, architectures side by side."""
    intro = f"""\
# What the kernels need

Registers per thread / shared memory in KiB per CTA, as Triton's assembler reports them for compute capability 8.0, 9.0
and 10.0. Compiled, not run: this says nothing about speed.

{spills(found)}
Another Triton gives other figures and may spill (`docs/kernels.md`, versions): see `spilled_bytes` in what
`python -m benchmarks kernel_resources --json` prints with yours.

By `python -m benchmarks kernel_resources --output benchmarks/results/kernel-resources.md`;
`tests/test_compiled_kernels.py` guards it.

Shapes: {HEADS} heads, {Q_PER_KV} query heads each, segments of {SEGMENT} tokens, open ones in pages of {TOKENS}; a
tile is query rows x key rows.
Decode and extend load keys and values 16 bytes at a time, asynchronously, with two copies in flight; decode over an
FP8 cache loads some of them 8 bytes at a time. fp8e4nv is E4M3, which needs compute capability 8.9, and fp8e5 is E5M2;
queries are bf16 there. int8, k8v4, k6v4 and k4v4 are slabs of codes (`docs/slab-formats.md`), tails and queries bf16.
Head dimensions 80 and 96 stand for those that are no powers of two.
"""
    lines = [
        intro,
        "| kernel | dtype | head_dim | tile | 8.0 | 9.0 | 10.0 | matrix instructions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str, int], list[Resources]] = {}
    for one in found:
        rows.setdefault((one.kernel, one.dtype, one.head_dim), []).append(one)
    for (kernel, dtype, dim), several in sorted(rows.items()):
        cells = ["-"] * (len(ARCHITECTURES) - len(several)) if dtype in FP8 else []
        cells += [f"{one.registers} / {one.shared_bytes / 1024:.1f}" for one in several]
        cores = ", ".join(dict.fromkeys(one.tensor_core for one in several if one.tensor_core)) or "none"
        shapes = ", ".join(dict.fromkeys(one.tile for one in several)) or "-"
        lines.append(f"| {kernel} | {dtype} | {dim or '-'} | {shapes} | {' | '.join(cells)} | {cores} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser("kernel_resources", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel in place of the table")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file, too")
    options = parser.parse_args()
    every = [(build, architecture) for architecture in ARCHITECTURES for build in builds(architecture)]
    progress = track(every, description="compiling", console=Console(stderr=True))
    found = [compile_build(build, architecture) for build, architecture in progress]
    if options.output is not None:
        options.output.write_text(markdown(found))
    print(json.dumps([asdict(one) for one in found], indent=1) if options.json else markdown(found))


if __name__ == "__main__":
    main()
