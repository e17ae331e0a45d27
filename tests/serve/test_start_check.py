"""How much the check at the start asks for, and what it reports; `tests/server/test_start_check.py` runs it."""

import numpy as np
import pytest

from sgl_ragged.launch.plan import StartCheck
from sgl_ragged.serve import start_check
from sgl_ragged.serve.start_check import Outcome, check_answers
from sgl_ragged.verify.comparison import compare
from sgl_ragged.verify.profile_reference import ProfileReference
from sgl_ragged.verify.server import Server
from tests.profiles.test_reference import make_profile, make_text

TOKENS = 700


class Echo(Server):
    """Predicts what the reference has, `shift` nats worse, and one token with certainty where it decodes."""

    url = "echo"

    def __init__(self, texts, shift: float = 0.0) -> None:
        self.texts, self.shift = {text.tokens.tobytes(): text for text in texts}, shift

    def info(self):
        return {"ragged": {"segment": 256}}

    def generate(self, body):
        ids, start = np.array(body["input_ids"], dtype=np.int32), body.get("logprob_start_len", 0)
        own, top = [(-9.0, int(token), None) for token in ids[start:]], [[(-0.1, 7, None)]] * (len(ids) - start)
        text = self.texts.get(ids.tobytes())
        if text is not None:
            for at in range(max(start, text.first), len(ids)):
                row = at - text.first
                shifted = text.likeliest_logprobs[row] - self.shift
                own[at - start] = (float(text.logprobs[row]), int(ids[at]), None)
                top[at - start] = list(zip(shifted.tolist(), text.likeliest[row].tolist(), strict=True))
        count = body["sampling_params"]["max_new_tokens"]
        out = [(-9.0, 7, None)] * count
        meta = {"input_token_logprobs": own, "input_top_logprobs": top}
        meta |= {"output_token_logprobs": out, "output_top_logprobs": [[(-0.1, 7, None)]] * count}
        return {"meta_info": meta, "output_ids": [7] * count}


@pytest.fixture
def texts():
    return tuple(make_text(name, TOKENS, TOKENS - 257) for name in ("code", "german", "prose"))


@pytest.fixture
def profile(tmp_path, texts):
    path = tmp_path / "p.safetensors"
    make_profile(reference=texts).save(path)
    return path


def test_equal_predictions_have_no_faults(profile, texts):
    outcome = check_answers(Echo(texts), StartCheck(profile, False, False, 60), 4096)
    found = outcome.as_json()
    assert found["texts"] == ["code", "german"]
    assert found["faults"] == []
    assert found["to_reference"]["kl"] == pytest.approx(0, abs=1e-9)
    assert found["to_reference"]["positions"] == 2 * (TOKENS - 257)
    assert str(outcome).startswith("answers checked in ")
    assert "same top-1 token 1.000" in str(outcome)


def test_other_predictions_are_faults(profile, texts):
    outcome = check_answers(Echo(texts, shift=2.0), StartCheck(profile, False, False, 60), 4096)
    (fault,) = outcome.faults
    assert fault.startswith("KL to the reference is ")


@pytest.mark.parametrize(("seconds", "asked"), [(60, 2), (0.06, 1), (0.01, 0)])
def test_the_time_decides_how_many_texts_are_asked_for(profile, texts, monkeypatch, seconds, asked):
    monkeypatch.setattr(start_check, "_seconds_per_token", lambda server, ids: 2e-5)
    outcome = check_answers(Echo(texts), StartCheck(profile, False, False, seconds), 4096)
    if asked:
        assert len(outcome.found.prompts) == asked
    else:
        assert outcome.as_json() == {"skipped": "a text would take about 0 s, --ragged-check-seconds is 0.01"}


def test_texts_that_are_too_long_are_not_asked_for(profile, texts):
    outcome = check_answers(Echo(texts), StartCheck(profile, False, False, 60), TOKENS)
    assert outcome == Outcome(None, skipped=f"texts are longer than {TOKENS} tokens, the longest prompt that it takes")
    assert str(outcome).startswith("answers were not compared")


def test_requests_of_a_namespace_ask_one_replica(texts):
    asked: dict[str, set[int]] = {}

    class Replicas(Echo):
        def info(self):
            return super().info() | {"dp_size": 2}

        def generate(self, body):
            asked.setdefault(body["extra_key"], set()).add(body["routed_dp_rank"])
            return super().generate(body)

    reference = ProfileReference(texts, 256, "p")
    compare(Replicas(texts), reference, reference.prompts * 5)
    assert {len(replicas) for replicas in asked.values()} == {1}
    assert set.union(*asked.values()) == {0, 1}
