"""HTTP of one vLLM server: completions as streams that a thread of their own reads, control calls that block."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

import httpx

from forge.rollout.engine import EngineRequest
from forge.types import Json

GENERATE = "/inference/v1/generate"
#: While a control call takes long (weights of a large model from a shared file system), the server's health is asked so
#: often: a call that its engine died under is never answered.
HEALTH_S = 2.0
HEALTH_TIMEOUT_S = 30.0


class Span(NamedTuple):
    """Sampled tokens [start, end) of a stream came from weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of stream `key` since its last chunk. On the last one `finish`, the spans of all its tokens, and how many
    prompt tokens were found cached."""

    key: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None
    spans: tuple[Span, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Stream `key` ended without its last chunk. `refused`: by the server, which is well."""

    key: str
    why: str
    refused: bool


News = Chunk | Broken


class Client:
    """Owned by one thread; only `_run` and the coroutines run in the client's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._news: SimpleQueue[News] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        # A connection is used once: a server that closes an idle one just as it is used again would look dead.
        once = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=once)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True)
        self._thread.start()

    def open(self, key: str, body: Json) -> None:
        """Begin a stream; its news bear `key`."""
        self._loop.call_soon_threadsafe(self._begin, key, body)

    def hang_up(self, key: str) -> None:
        """End a stream; the server aborts it. News of it may still lie in the queue."""
        self._loop.call_soon_threadsafe(self._cancel, key)

    def news(self, timeout_s: float) -> list[News]:
        """What came, waiting at most so long for the first of it."""
        got: list[News] = []
        with contextlib.suppress(Empty):
            got.append(self._news.get(timeout=timeout_s))
            while True:
                got.append(self._news.get_nowait())
        return got

    def post(self, path: str, body: Json | None = None) -> None:
        """A control call, until it is done. Raises httpx.HTTPError."""
        asyncio.run_coroutine_threadsafe(self._post(path, body), self._loop).result()

    def is_healthy(self) -> bool:
        """Whether the server says that its engine is well."""
        try:
            asyncio.run_coroutine_threadsafe(self._check_health(), self._loop).result()
        except httpx.HTTPError:
            return False
        return True

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- in the loop ------

    async def _post(self, path: str, body: Json | None) -> None:
        call = asyncio.ensure_future(self._http.post(path, json=body))
        try:
            while not (await asyncio.wait({call}, timeout=HEALTH_S))[0]:
                await self._check_health()
            checked(await call)
        finally:
            call.cancel()

    async def _check_health(self) -> None:
        checked(await self._http.get("/health", timeout=HEALTH_TIMEOUT_S))

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._http.aclose()

    def _begin(self, key: str, body: Json) -> None:
        task = self._tasks[key] = self._loop.create_task(self._read(key, body))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, key: str) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()

    async def _read(self, key: str, body: Json) -> None:
        try:
            async with self._http.stream("POST", GENERATE, json=body) as answer:
                if answer.is_error:
                    why = reason((await answer.aread()).decode(errors="replace"))
                    self._news.put(Broken(key=key, why=why, refused=answer.status_code < 500))
                    return
                await self._chunks(key, answer)
        except (httpx.HTTPError, ValueError) as error:
            why = f"{type(error).__name__}: {error or repr(error.__cause__)}"
            self._news.put(Broken(key=key, why=why, refused=False))

    async def _chunks(self, key: str, answer: httpx.Response) -> None:
        """The last chunk waits for the usage that comes after it. Raises ValueError where the stream is no such."""
        last: Json | None = None
        cached = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise ValueError(reason(line[6:]))
            if usage := data.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            for choice in data["choices"]:
                if choice["finish_reason"] is None:
                    self._news.put(_chunk(key, choice))
                else:
                    last = choice
        if last is None:
            raise ValueError("the stream ended before the completion")
        self._news.put(_chunk(key, last, cached))


def checked(answer: httpx.Response) -> None:
    """Raises httpx.HTTPStatusError, which says why, for an error."""
    if answer.is_error:
        why = f"{answer.url.path}: {answer.status_code} {reason(answer.text)}"
        raise httpx.HTTPStatusError(why, request=answer.request, response=answer)


def _chunk(key: str, choice: Json, cached: int = 0) -> Chunk:
    content = (choice["logprobs"] or {}).get("content") or []
    spans = tuple(Span(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ())
    return Chunk(
        key=key,
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(one["logprob"] for one in content),
        finish=choice["finish_reason"],
        spans=spans,
        cached_tokens=cached,
    )


def body_of(request: EngineRequest, sampled: tuple[int, ...], max_tokens: int, salt: str, key: str) -> Json:
    """A request to go on after `sampled`. Its stop ids are all that ends it before `max_tokens`.

    `salt` is part of the key of every KV block it makes or finds.
    """
    sampling = request.sampling
    grammar = {} if sampling.grammar is None else {"structured_outputs": {"grammar": sampling.grammar}}
    return {
        "request_id": key,
        "token_ids": [*request.prompt_ids, *sampled],
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,
            "seed": sampling.seed,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            **grammar,
        },
    }


def reason(text: str) -> str:
    """What an error body says."""
    try:
        data = json.loads(text)
        error = data.get("error", data.get("detail", data))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text[:500]
