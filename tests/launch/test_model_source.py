"""How calibration reads what a model path stands for: as the server does, with its settings."""

from __future__ import annotations

import json
import shutil

import pytest

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.launch.model_source import load_tokenizer, read_config
from sgl_ragged.launch.models import model_geometry
from tests.character_model import make_character_model

CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own-of-this-test"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_character_model(tmp_path_factory.mktemp("model") / "model")


def test_code_of_the_model_is_run_for_those_who_trust_it(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(model, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-of-this-test", "auto_map": {"AutoConfig": "own_config.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_config.py").write_text(CODE)
    with pytest.raises(RaggedConfigError, match="cannot read the config") as refused:
        read_config(str(folder), {})
    assert "\n" not in str(refused.value)
    assert model_geometry(read_config(str(folder), {"trust_remote_code": True})).num_heads == 4


def test_overrides_of_the_server_count(model):
    overrides = json.dumps({"num_hidden_layers": 1})
    assert model_geometry(read_config(str(model), {"json_model_override_args": overrides})).num_layers == 1


def test_the_tokenizer_may_be_elsewhere(model, tmp_path):
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    with pytest.raises(RaggedConfigError, match="--tokenizer-path") as refused:
        load_tokenizer(str(bare), {})
    assert "\n" not in str(refused.value)
    found = load_tokenizer(str(bare), {"tokenizer_path": str(model)})
    assert found.encode("abc") == load_tokenizer(str(model), {}).encode("abc")
