"""Ids of LoRA adapters: what is in them is part of their name."""

from __future__ import annotations

import os
import shutil

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.features.host_tier.adapters import adapter_digest
from tests.models import make_adapter, make_llama

load_plugins()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


def test_digests_change_with_contents_alone(llama, tmp_path):
    one, copy = make_adapter(llama, tmp_path / "one", seed=1), tmp_path / "copy"
    own = adapter_digest(str(one))
    shutil.copytree(one, copy)
    os.utime(copy / "adapter_model.safetensors", (0, 0))
    (copy / "README.md").write_text("nobody reads it")
    assert adapter_digest(str(copy)) == own
    weights = (copy / "adapter_model.safetensors").stat()
    make_adapter(llama, copy, seed=2)
    os.utime(copy / "adapter_model.safetensors", ns=(weights.st_atime_ns, weights.st_mtime_ns))
    assert (copy / "adapter_model.safetensors").stat().st_size == weights.st_size
    other = adapter_digest(str(copy))
    (copy / "adapter_config.json").write_text("{}")
    assert len({own, other, adapter_digest(str(copy))}) == 3


def test_the_launcher_names_adapters_by_what_is_in_them(llama, tmp_path):
    adapter = make_adapter(llama, tmp_path / "adapter", seed=1)

    def ids(*flags: str) -> list[str]:
        ragged = ("--kv-pool", "ragged", "--ragged-profile", "uniform", "--enable-hierarchical-cache")
        given = ("--model-path", str(llama), "--device", "cpu", "--enable-lora", "--lora-paths", *flags)
        args = prepare_server_args([*given, *ragged])
        args.resolve_once()
        args.check_server_args()
        return [one.lora_id for one in resolving_view(args).lora_paths]

    first = ids(f"live={adapter}", f"other={adapter}")
    assert len(set(first)) == 2
    assert all(len(one) == 32 for one in first)
    assert ids(f"live={adapter}") == first[:1]
    make_adapter(llama, adapter, seed=2)
    assert ids(f"live={adapter}") != first[:1]
    with pytest.raises(SystemExit, match=r"^sgl_ragged: LoRA adapter .*nowhere is no folder.*correct --lora-paths$"):
        ids(f"live={tmp_path / 'nowhere'}")


def test_an_adapter_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(RaggedConfigError, match="correct --lora-paths") as refused:
        adapter_digest(str(tmp_path / "nowhere"))
    assert "\n" not in str(refused.value)
