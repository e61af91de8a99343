"""A turn that goes on from a reply holds the ids that were sampled, whatever a tokenizer would make of their text."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from gateway_support import ScriptedBackend, live
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat import PLAIN, TOOL, TOOLS, write_tokenizer

from forge.gateway.chat import HfChatCodec, template_warning
from forge.gateway.fake_chat import END, FakeChatCodec
from forge.gateway.recovery import Fork
from forge.rollout.engine import Delta, Sampling
from forge.types import Json

#: forgets what was thought before the last user's turn, as several published templates do
FORGETFUL = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IM_END = 2
words = st.text(alphabet="abc é<>{}\n\"'", max_size=12)


def codec(folder: Path, template: str) -> HfChatCodec:
    return HfChatCodec(write_tokenizer(folder, template))


@pytest.fixture(scope="module", params=[PLAIN, TOOLS], ids=["plain", "tools"])
def given_codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfChatCodec:
    return codec(tmp_path_factory.mktemp("t"), request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    texts=st.lists(words, min_size=2, max_size=5), after=st.lists(words, min_size=1, max_size=3), closed=st.booleans()
)
def test_what_follows_a_reply_is_what_the_template_puts_there(
    given_codec: HfChatCodec, texts: list[str], after: list[str], closed: bool
) -> None:
    """Where the reply's own ids are those of its text, nothing else may change: the prompt is the template's."""
    roles = ["user", "assistant"] * 3
    before: list[Json] = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    if before[-1]["role"] == "user":
        before.append({"role": "assistant", "content": "ok"})
    later: list[Json] = [{"role": "user", "content": t} for t in after]
    prompt = given_codec.prompt(before[:-1], [TOOL])
    text = given_codec.encode(before[-1]["content"])
    sampled = (*text, IM_END) if closed else text
    last = sampled[-1] if sampled else 5
    rest = given_codec.continuation(before, later, [TOOL], last)
    assert rest is not None
    assert prompt + sampled + rest == given_codec.prompt([*before, *later], [TOOL])


def test_a_template_that_forgets_thoughts_is_told(tmp_path: Path) -> None:
    forgetful = codec(tmp_path, FORGETFUL)
    thinking = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "hm"}]
    assert forgetful.continuation(thinking, [{"role": "user", "content": "c"}], [], IM_END) is None
    assert forgetful.continuation(thinking, [{"role": "tool", "content": "c"}], [], IM_END) is not None
    plain = [thinking[0], {"role": "assistant", "content": "b"}]
    assert forgetful.continuation(plain, [{"role": "user", "content": "c"}], [], IM_END) is not None


def test_templates_that_are_not_prefix_stable_are_named(tmp_path: Path) -> None:
    for name, template in (("plain", PLAIN), ("tools", TOOLS)):
        (tmp_path / name).mkdir()
        assert template_warning(name, codec(tmp_path / name, template)) is None
    warning = template_warning("m", codec(tmp_path, FORGETFUL))
    assert warning == (
        "m: its chat template is not prefix-stable: a turn before a user's message, where it reasoned is shown "
        "differently from how it was sampled, so it is tokenised anew and counts as a fork (template)"
    )


class Babbling(ScriptedBackend):
    """Samples any ids at all, most of which no tokenizer would choose for their text."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        super().__init__(lambda _t, _p: "")
        self.random = random.Random(seed)
        self.vocabulary = vocabulary

    async def generate(
        self,
        trajectory: str,  # noqa: ARG002 - the seam's signature
        prompt_ids: tuple[int, ...],  # noqa: ARG002
        sampling: Sampling,
    ) -> AsyncIterator[tuple[int, Delta]]:
        ids = [self.random.randrange(3, self.vocabulary) for _ in range(self.random.randrange(1, 30))]
        cut = (*ids, IM_END)[: sampling.max_tokens]
        n = len(cut)
        finish = "stop" if cut[-1] == IM_END else "length"
        yield 0, Delta(id="x", token_ids=cut, logprobs=(-1.0,) * n, versions=(1,) * n, finish=finish)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_turn_repeats_the_ids_before_it(tmp_path: Path, stream: bool) -> None:
    """Replies of random ids, some cut short: the next prompt begins with what the engine saw and sampled."""
    backend = Babbling(3, 400)
    async with live(backend, codec(tmp_path, PLAIN)) as server, server.client() as client:
        messages: list[Json] = [{"role": "user", "content": "go"}]
        for turn in range(60):
            asked = {"model": "m", "messages": messages, "max_tokens": 12 if turn % 5 == 4 else 100}
            if stream:
                chunks = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
            else:
                reply = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
                text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"again {turn}"}]
        echoes = server.gateway.tree("t1").echoes
    records = backend.records["t1"]
    assert [record.parent for record in records] == [None, *range(59)]
    assert [record.fork for record in records] == ["root", *[None] * 59]
    for before, after in pairwise(records):
        whole = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(whole)] == whole
    assert echoes == {"exact": 59}


async def test_forks_are_recorded_with_their_reasons() -> None:
    backend = ScriptedBackend(lambda _t, prompt: f"reply to {prompt[-4:]} STOP and more")
    hello: list[Json] = [{"role": "user", "content": "hello"}]
    more: list[Json] = [{"role": "user", "content": "more"}]
    async with live(backend) as server, server.client() as client:

        async def ask(messages: list[Json], **options: object) -> Json:
            reply = await client.chat.completions.create(model="m", messages=messages, **options)  # type: ignore[call-overload]
            return reply.choices[0].message.model_dump(exclude_none=True)  # type: ignore[no-any-return]

        first = await ask(hello)
        await ask([*hello, first, *more])
        await ask([*hello, first, *more])
        await ask([*hello, first | {"content": "never said"}, *more])
        await ask(hello, extra_headers={"x-openai-subagent": "collab_spawn"})
        cut = await ask(more, stop="STOP")
        await ask([*more, cut, *hello])
        await ask(more, n=2)
    forks = [record.fork for record in backend.records["t1"]]
    expected = [Fork.ROOT, None, Fork.RESAMPLE, Fork.REWRITE, Fork.SUB_AGENT, Fork.APART, Fork.STOP]
    assert forks == [*expected, Fork.RESAMPLE, Fork.RESAMPLE]
    parents = [record.parent for record in backend.records["t1"]]
    assert parents == [None, 0, 0, None, None, None, 5, None, None]


async def test_an_ended_trajectory_leaves_no_tree() -> None:
    backend = ScriptedBackend(lambda _t, _p: "hi")
    async with live(backend) as server, server.client() as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert set(server.gateway.tree("t1").nodes) == {0}
        server.gateway.forget("t1")
        assert not server.gateway.tree("t1").nodes


def test_a_reply_without_its_end_gets_it() -> None:
    after = [{"role": "user", "content": "u"}]
    fake = FakeChatCodec()
    assert fake.continuation([], after, [], 7) == (END, *fake.continuation([], after, [], END))
