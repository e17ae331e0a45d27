"""The OpenAI client against a ragged server: what it asks for, it gets."""

from __future__ import annotations

import json
import math

import httpx
import jsonschema
import pytest
from openai import OpenAI

from tests.server.client import flush

pytestmark = pytest.mark.server

MODEL, SEGMENT = "any", 64
MESSAGES = [
    {"role": "system", "content": "You look after a lighthouse and answer letters. " * 3},
    {"role": "user", "content": "How high is the lamp above the sea, and how far does it reach?"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "height": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["metres", "feet"]},
        "lit": {"type": "boolean"},
    },
    "required": ["height", "unit", "lit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "measure", "description": "Measures the lamp.", "strict": True, "parameters": SCHEMA},
}


@pytest.fixture(scope="module")
def client(character_server):
    return OpenAI(base_url=f"{character_server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: OpenAI, messages=MESSAGES, **options):
    options = {"temperature": 0, "max_tokens": 40} | options
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def test_streamed_pieces_make_the_whole_answer(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 5
    assert "".join(pieces) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40


def test_later_turns_report_cached_tokens(client, character_server):
    flush(character_server)
    first = ask(client)
    assert not (first.usage.prompt_tokens_details and first.usage.prompt_tokens_details.cached_tokens)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(client, [*MESSAGES, answer, {"role": "user", "content": "And in fog?"}])
    common = first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= common // SEGMENT * SEGMENT > 0


def test_chat_logprobs(client):
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        # Greedy: what was taken is the most likely.
        assert max(top.logprob for top in entry.top_logprobs) == pytest.approx(entry.logprob, abs=1e-5)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5


def test_completions_echo_with_logprobs_of_the_prompt(client):
    prompt = "The lamp turns once in ten seconds. " * 4
    done = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=5, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert done.text.startswith(prompt)
    assert len(done.logprobs.tokens) == len(done.logprobs.token_logprobs) == len(prompt) + 5
    assert all(value <= 0 for value in done.logprobs.token_logprobs[1:])


def test_several_choices(client):
    greedy = ask(client, n=3)
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in greedy.choices}) == 1
    sampled = ask(client, n=3, temperature=1.5)
    assert len({choice.message.content for choice in sampled.choices}) == 3
    assert sampled.usage.completion_tokens <= 3 * 40
    chunks = list(ask(client, n=2, temperature=1.0, stream=True))
    assert {chunk.choices[0].index for chunk in chunks if chunk.choices} == {0, 1}


def test_stop_strings(client):
    whole = ask(client).choices[0].message.content
    stop = whole[17:19]
    stopped = ask(client, stop=[stop, "never said"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(stop)]
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stop=stop, stream=True) if chunk.choices]
    assert "".join(pieces) == whole[: whole.index(stop)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "measure"}}])
def test_tools(client, choice):
    answer = ask(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "measure"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    # The result goes back, and the model may answer.
    result = {"role": "tool", "tool_call_id": call.id, "content": "54 metres"}
    follow = ask(client, [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]}, result])
    assert follow.choices[0].message.content


def test_streamed_tool_call(client):
    chunks = list(ask(client, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True))
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["measure"]
    jsonschema.validate(json.loads("".join(call.function.arguments or "" for call in calls)), SCHEMA)


def test_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": SCHEMA, "strict": True}}
    done = ask(client, response_format=form, max_tokens=200).choices[0]
    assert done.finish_reason == "stop"
    jsonschema.validate(json.loads(done.message.content), SCHEMA)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(client, response_format=form, max_tokens=200, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == done.message.content


def test_the_server_is_a_ragged_one(character_server):
    assert httpx.get(f"{character_server.url}/server_info", timeout=60).json()["ragged"]["ratio"] == 0.5
