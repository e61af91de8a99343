"""Legacy completions with the stock openai client."""

from __future__ import annotations

import openai
import pytest
from gateway_support import ScriptedBackend, live

TEXT = "<think>no</think> <tool_call>x"


async def test_text_as_it_was_sampled() -> None:
    backend = ScriptedBackend(lambda _t, prompt: f"{prompt}: {TEXT}")
    async with live(backend) as server, server.client() as client:
        whole = await client.completions.create(model="m", prompt="Hi", max_tokens=100, logprobs=0)
        stream = await client.completions.create(
            model="m", prompt="Hi", max_tokens=100, logprobs=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        short = await client.completions.create(model="m", prompt=[72, 105])
    n = len(f"Hi: {TEXT}") + 1
    assert whole.choices[0].text == f"Hi: {TEXT}"
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, n)
    assert whole.choices[0].logprobs.token_logprobs == [-0.5] * n
    assert whole.choices[0].logprobs.text_offset == list(range(n))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    told = [token for chunk in chunks[:-1] for token in chunk.choices[0].logprobs.tokens]
    assert told == whole.choices[0].logprobs.tokens
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (short.choices[0].text, short.choices[0].finish_reason) == (f"Hi: {TEXT}"[:16], "length")
    assert backend.records["t1"][2].prompt_ids == (72, 105)


async def test_several_prompts_several_times() -> None:
    backend = ScriptedBackend(lambda _t, prompt: f"{prompt}!")
    async with live(backend) as server, server.client() as client:
        whole = await client.completions.create(model="m", prompt=["a", "bb"], n=2)
        stream = await client.completions.create(model="m", prompt=["a", "bb"], n=2, stream=True)
        texts = ["", "", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == texts == ["a!", "a!", "bb!", "bb!"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 3 + 3 + 4 + 4)
    assert len(backend.records["t1"]) == 8


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"), ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 3}, "logprobs"), ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ],
)  # fmt: skip
async def test_bad_requests_name_the_field(options: dict[str, object], param: str) -> None:
    async with live(ScriptedBackend(lambda _t, _p: "")) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", **options)
    assert caught.value.param == param
