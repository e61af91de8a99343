"""The one request all protocols parse into, and what of it only a constrained sampler could keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge.types import Json

#: A prompt that is no conversation: text, or token ids.
RawPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What a reply must be. `field` names what asked for it, in its protocol's words.

    With `calls` the reply must be a tool call, of one of `tools` where any is named; else its content must be a JSON
    object, valid under `schema` where there is one.
    """

    field: str
    calls: bool = False
    tools: tuple[str, ...] = ()
    schema: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the gateway works on it. None means the client left it to the server.

    Either `messages` and `tools` in the form of forge.gateway.conversation, or `prompts`. Every prompt is answered
    `n` times; answers are numbered prompt by prompt.
    """

    #: replies bear the name that was asked for: one client drops the thoughts of a turn that bears another
    model: str = ""
    messages: Sequence[Json] = ()
    tools: Sequence[Json] = ()
    prompts: tuple[RawPrompt, ...] = ()
    n: int = 1
    #: whether tool tags in the reply are calls; with tool_choice "none" they are text
    calls_allowed: bool = False
    #: False: the reply ends with its first call
    parallel_calls: bool = True
    constraints: tuple[Constraint, ...] = ()
    #: fields that ask for what the gateway cannot give and that may be overlooked, if the reply says so
    overlooked: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


#: The grammar (forge.rollout.grammar) whose sentences are the replies to this prompt of the request that keep the
#: constraint; None where there is no such grammar. The seam for engines that decode under one.
Constrain = Callable[[Constraint, Request, tuple[int, ...]], str | None]
