"""What requests may ask of sampling, on the recall model: grammars that its words spell or not, logit processors."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from benchmarks.recall import MODEL, task

pytestmark = pytest.mark.server

COMMON = ("--dtype", "float32", "--kv-bytes", "32MiB", "--max-running-requests", "4", "--enable-custom-logit-processor")
QUESTION = "<bos> <user> w3 w17 . k5 v9 . recall k5 <assistant>"
SCHEMA = json.dumps({"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]})


class Favour(CustomLogitProcessor):
    """The request's token wins at every other position."""

    def __call__(self, logits: torch.Tensor, params: list[dict] | None = None) -> torch.Tensor:
        for row, own in zip(logits, params or (), strict=True):
            own["steps"] = own.get("steps", 0) + 1
            if own["steps"] % 2:
                row[own["token"]] += 1e4
        return logits


@pytest.fixture(scope="module")
def server(tmp_path_factory, servers):
    flags = ("--kv-pool", "ragged", "--ragged-ratio", "1", "--ragged-segment", "64")
    with servers.serve(MODEL, *COMMON, *flags, log=tmp_path_factory.mktemp("constrained") / "log") as server:
        yield server


def ask(server, **sampling) -> httpx.Response:
    body = {"text": QUESTION, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **sampling}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


@pytest.mark.parametrize("form", [{"regex": "v[0-9]+"}, {"ebnf": 'root ::= "v9" | "v1"'}, {"regex": "k[0-9]"}])
def test_a_grammar_of_the_models_words_is_followed(server, form):
    """Tokens are words: what stands between two of them in text is in no token, so a grammar has one."""
    text = ask(server, **form).json()["text"].strip()
    assert (text == "v9") if "k" not in form.get("regex", "") else (text in task.KEYS[:10])


@pytest.mark.parametrize("form", [{"regex": "[0-9]{4}"}, {"json_schema": SCHEMA}, {"regex": "(v[0-9]+ )+"}])
def test_a_grammar_that_no_words_spell_is_an_error_that_says_so(server, form):
    answer = ask(server, **form)
    assert answer.status_code == 500
    assert next(iter(form.values()))[:5].replace('"', "") in answer.json()["message"].replace('"', "")
    assert "Tokens not accepted" in answer.json()["message"]
    # In a stream the status is out before: the error is the reason for which the answer ends, without text.
    body = {"text": QUESTION, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **form}, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as stream:
        lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert lines[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert "Tokens not accepted" in lines[-1]["meta_info"]["finish_reason"]["message"]
    assert ask(server).json()["text"].strip() == "v9"


def sampled(server) -> list[list[int]]:
    """A batch in which every other request has a logit processor, through the end of a segment."""
    rng = np.random.default_rng(0)
    prompts = [task.document(rng, 100, "chat").tolist()[: 90 + n] for n in range(4)]
    favour = {
        "temperature": 0,
        "max_new_tokens": 60,
        "ignore_eos": True,
        "custom_params": {"token": task.TOKEN_ID["v3"]},
    }
    usual = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    body = {
        "input_ids": prompts,
        "sampling_params": [usual, favour] * 2,
        "custom_logit_processor": [None, Favour().to_str()] * 2,
    }
    answers = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()
    return [answer["output_ids"] for answer in answers]


def test_logit_processors_do_the_same_on_both_pools(server, tmp_path, servers):
    found = sampled(server)
    wanted = task.TOKEN_ID["v3"]
    for tokens in found[1::2]:
        assert tokens[::2] == [wanted] * 30
    assert all(tokens.count(wanted) < 15 for tokens in found[::2])
    with servers.serve(MODEL, *COMMON, "--kv-pool", "token", log=tmp_path / "log") as other:
        assert sampled(other) == found
