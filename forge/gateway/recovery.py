"""Recovers a trajectory's conversations from its requests alone: a tree of completions, with a reason for every fork.

Clients send their whole history with every request, and not as it was sampled: arguments are written anew, text beside
calls is dropped, turns are rewritten, old ones left out. A request continues a completion if its messages begin with
that completion's own messages and its reply. A reply is known by the ids of its tool calls, which the gateway minted,
else by its text; how far the echo differs from what was sampled is counted. Everything else is a fork.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from forge.types import Json

#: the least text of a reply that is known again inside another message
SUMMARY_CHARS = 24
#: claude-code asks for one behind an analysis, and shows what is between the tags alone
SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
#: newest completions that a conversation which begins anew is compared with
COMPARED = 32


class Fork(StrEnum):
    """Why a completion does not simply go on from its parent's reply (or, without a parent, from nothing)."""

    ROOT = "root"  # the trajectory's first conversation
    BRANCH = "branch"  # the reply it follows was already followed by something else
    RESAMPLE = "resample"  # the same prompt, once more
    REWRITE = "rewrite"  # a sampled turn came back changed
    INVENTED = "invented"  # it holds an assistant turn that was never sampled
    TRUNCATION = "truncation"  # turns were left out
    COMPACTION = "compaction"  # begins anew around a reply: a summary
    TOOLS = "tools"  # the same messages with other tools
    SUB_AGENT = "sub_agent"  # begun by another of the client's agents: it says so, or a call's argument is the task
    APART = "apart"  # a conversation of its own, begun after the first: a side call, another agent of a team
    TEMPLATE = "template"  # the model's template shows earlier turns differently now
    STOP = "stop"  # the reply was cut at a stop string, so what came back is not what was sampled


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs: after the reply of completion `parent`, with which its first `known` messages end; None:
    from nothing."""

    parent: int | None
    known: int


@dataclass(slots=True)
class Node:
    """One completion. `keys`: of its prompt's messages; `lead` stands for its tools and the system messages at its
    beginning; `fork` None: its parent's first and plain continuation. `cut`: a stop string ended it."""

    parent: int | None
    fork: Fork | None
    keys: tuple[int, ...]
    tools: int
    lead: int
    reply: Json
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    cut: bool
    children: list[int] = field(default_factory=list)


class Conversations:
    """The tree of one trajectory, by completion. `place` a request, and `add` its completion once it is recorded."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.echoes: Counter[str] = Counter()  # replies that came back, by how they differed; "exact" where not
        self._ends: dict[int, list[int]] = {}  # nodes by the chain of their messages and their reply
        self._starts: dict[int, list[int]] = {}  # nodes by the chain of their prompts
        self._minted: set[str] = set()

    def place(self, messages: Sequence[Json], tools: Sequence[Json]) -> Place:
        """Changes nothing."""
        _, chains = self._chains(messages, tools)
        for known in range(len(messages), 0, -1):
            parent = self._answered(chains[known], messages[known - 1])
            if parent is not None:
                return Place(parent, known)
        return Place(None, 0)

    def add(
        self,
        number: int,
        place: Place,
        messages: Sequence[Json],
        tools: Sequence[Json],
        *,
        reply: Json,
        prompt_ids: tuple[int, ...],
        sampled_ids: tuple[int, ...],
        cut: bool = False,
        known_fork: Fork | None = None,
        is_sub_agent: bool = False,
    ) -> Fork | None:
        """Completion `number` of the trajectory; returns why it forks. `reply`: the assistant's message, with the ids
        its calls were given. `known_fork`: why its prompt could not repeat its parent's ids. `is_sub_agent`: its client
        says so."""
        keys, chains = self._chains(messages, tools)
        parent = place.parent
        if parent is None:
            fork: Fork | None = self._from_nothing(messages, keys, chains, is_sub_agent=is_sub_agent)
        else:
            fork = known_fork or self._fork(messages, keys, chains, parent, place.known)
            self.nodes[parent].children.append(number)
            self.echoes.update(differences(self.nodes[parent].reply, messages[place.known - 1]) or ("exact",))
        self.nodes[number] = Node(
            parent=parent,
            fork=fork,
            keys=tuple(keys),
            tools=chains[0],
            lead=_lead(messages, chains),
            reply=reply,
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            cut=cut,
        )
        self._starts.setdefault(chains[-1], []).append(number)
        self._minted.update(ids_of(reply))
        for key in {_by_ids(reply), _by_text(reply)}:
            self._ends.setdefault(hash((chains[-1], key)), []).append(number)
        return fork

    def _chains(self, messages: Sequence[Json], tools: Sequence[Json]) -> tuple[list[int], list[int]]:
        """Keys of the messages; and for every count of leading messages, what stands for them and the tools."""
        keys = [self._key(message) for message in messages]
        chains = [hash(json.dumps(list(tools), sort_keys=True))]
        for key in keys:
            chains.append(hash((chains[-1], key)))
        return keys, chains

    def _key(self, message: Json) -> int:
        ids = ids_of(message)
        known = bool(ids) and all(one in self._minted for one in ids)
        return _by_ids(message) if known else _by_text(message)

    def _answered(self, chain: int, echo: Json) -> int | None:
        """The completion whose messages and reply these are; of several, the newest that minted the echo's ids."""
        found = self._ends.get(chain, [])
        ids = ids_of(echo)
        own = [number for number in found if ids_of(self.nodes[number].reply) == ids] or found
        return own[-1] if own else None

    def _fork(
        self, messages: Sequence[Json], keys: list[int], chains: list[int], parent: int, known: int
    ) -> Fork | None:
        later = [i for i in range(known, len(messages)) if messages[i]["role"] == "assistant"]
        if later:
            if self._said_with_other_tools(keys, chains, later[0]):
                return Fork.TOOLS
            return self._shortened(messages, keys) or self._changed(messages, chains, known) or Fork.INVENTED
        if not self.nodes[parent].children:
            return None
        return Fork.RESAMPLE if chains[-1] in self._starts else self._changed(messages, chains, known) or Fork.BRANCH

    def _from_nothing(
        self, messages: Sequence[Json], keys: list[int], chains: list[int], *, is_sub_agent: bool
    ) -> Fork:
        if not self.nodes:
            return Fork.ROOT
        has_replies = any(message["role"] == "assistant" for message in messages)
        if is_sub_agent or (not has_replies and self._delegated(messages)):
            return Fork.SUB_AGENT
        if chains[-1] in self._starts:
            return Fork.RESAMPLE
        if any(node.tools != chains[0] and _begins(keys, node) for node in self.nodes.values()):
            return Fork.TOOLS
        if self._is_told(messages):
            return Fork.APART
        if self._summarised(messages, keys, chains):
            return Fork.COMPACTION
        other = Fork.INVENTED if has_replies else Fork.APART
        return self._shortened(messages, keys) or self._changed(messages, chains, 0) or other

    def _said_with_other_tools(self, keys: list[int], chains: list[int], at: int) -> bool:
        """Whether the assistant turn at `at` was sampled in this very conversation, but with other tools."""
        return any(
            node.tools != chains[0]
            and list(node.keys) == keys[:at]
            and keys[at] in (_by_ids(node.reply), _by_text(node.reply))
            for node in self.nodes.values()
        )

    def _changed(self, messages: Sequence[Json], chains: list[int], known: int) -> Fork | None:
        """Of messages that go on from a prompt of ours, but not with its reply: whether that came back changed, or was
        left out. None: they go on from no prompt longer than `known`."""
        begun = next((n for n in range(len(messages) - 1, known, -1) if chains[n] in self._starts), None)
        if begun is None:
            return None
        return Fork.REWRITE if messages[begun]["role"] == "assistant" else Fork.TRUNCATION

    def _shortened(self, messages: Sequence[Json], keys: list[int]) -> Fork | None:
        """Whether this is a conversation of ours with turns left out: up to its last reply all of it was there before,
        in this order, and more. What follows that reply is new."""
        old = keys
        while old and messages[len(old) - 1]["role"] != "assistant":
            old = old[:-1]
        for node in self._newest():
            whole = [*node.keys, _by_ids(node.reply), _by_text(node.reply)]
            if old and len(old) < len(node.keys) + 1 and _is_in_order(old, iter(whole)):
                return Fork.TRUNCATION
        return None

    def _summarised(self, messages: Sequence[Json], keys: list[int], chains: list[int]) -> bool:
        """Whether a conversation of ours that went on for some turns begins anew, with its system messages and tools,
        around a reply. A message that was there after that reply already does not count: it is not what is new."""
        lead = _lead(messages, chains)
        if not any(node.lead == lead and node.parent is not None for node in self.nodes.values()):
            return False
        later: set[int] = set()
        for node in self._newest():
            texts, is_other = _summaries(node.reply), node.lead != lead
            shown = (one for one, key in zip(messages, keys, strict=True) if key not in later)
            if texts and any(_quotes(one, texts, is_other) for one in shown):
                return True
            later.update(node.keys)
        return False

    def _is_told(self, messages: Sequence[Json]) -> bool:
        """Whether a user's message is a reply, signed with a name: one agent of a team hears what another said."""
        said = {text for node in self._newest() if (text := _text(node.reply))}
        signed = [message for message in messages if message["role"] == "user" and message.get("name")]
        return any(message["content"].strip() in said for message in signed)

    def _delegated(self, messages: Sequence[Json]) -> bool:
        """Whether a user's message is an argument of a call and nothing else: the task that an agent gave another."""
        asked = {message["content"].strip() for message in messages if message["role"] == "user"} - {""}
        calls = [call["function"]["arguments"] for node in self._newest() for call in node.reply.get("tool_calls", ())]
        return any(not asked.isdisjoint(_strings(arguments)) for arguments in calls)

    def _newest(self) -> Iterator[Node]:
        return islice(reversed(self.nodes.values()), COMPARED)


def differences(reply: Json, echo: Json) -> tuple[str, ...]:
    """How an echoed turn differs from the reply it stands for, by kind; () where it does not."""
    kinds = []
    if echo["content"] != reply["content"]:
        same = echo["content"].strip() == reply["content"].strip()
        kinds.append("whitespace" if same else "text_changed" if echo["content"].strip() else "text_dropped")
    if (reply.get("reasoning_content") or "").strip() != (echo.get("reasoning_content") or "").strip():
        kinds.append("reasoning_changed" if echo.get("reasoning_content") else "reasoning_dropped")
    pairs = list(zip(reply.get("tool_calls", ()), echo.get("tool_calls", ()), strict=False))
    functions = [(sent["function"], came["function"]) for sent, came in pairs]
    if any(sent["name"] != came["name"] for sent, came in functions):
        kinds.append("call_renamed")
    if any(_arguments(sent["arguments"]) != _arguments(came["arguments"]) for sent, came in functions):
        kinds.append("arguments_changed")
    elif any(sent["arguments"] != came["arguments"] for sent, came in functions):
        kinds.append("arguments_rewritten")
    return tuple(kinds)


def ids_of(message: Json) -> tuple[str, ...]:
    """Ids of an assistant's tool calls that have one."""
    return tuple(call["id"] for call in message.get("tool_calls", ()) if call.get("id"))


def _by_ids(message: Json) -> int:
    ids = ids_of(message)
    return hash(("calls", *ids)) if ids else _by_text(message)


def _by_text(message: Json) -> int:
    """Reasoning, ids and white space at the ends left out: many clients keep none of them."""
    calls = [
        (call["function"]["name"], _arguments(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return hash((message["role"], message["content"].strip(), *calls))


def _arguments(text: str) -> str:
    """JSON arguments in one form; broken ones as they are."""
    try:
        return _canonical(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        return text


def _canonical(value: object) -> str:
    """Keys in order, and 30.0 as 30: what clients make of numbers on the way."""
    return json.dumps(_whole(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _whole(value: object) -> object:
    match value:
        case dict():
            return {key: _whole(one) for key, one in value.items()}
        case list():
            return [_whole(one) for one in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _strings(arguments: str) -> set[str]:
    """Arguments of a call that are text."""
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return set()
    return {value.strip() for value in values.values() if isinstance(value, str)} if isinstance(values, dict) else set()


def _text(reply: Json) -> str:
    """A reply that calls no tool and is long enough to be known again."""
    text: str = reply["content"].strip()
    return text if len(text) >= SUMMARY_CHARS and not reply.get("tool_calls") else ""


def _quotes(message: Json, texts: Sequence[str], is_other: bool) -> bool:
    """Whether a message holds one of a reply's texts; one of the assistant only where that reply `is_other`, of another
    kind of conversation, else it is an echo."""
    if message["role"] == "tool" or (message["role"] == "assistant" and not is_other):
        return False
    return any(text in message["content"] for text in texts)


def _summaries(reply: Json) -> list[str]:
    """What of a reply may stand in a conversation that begins anew: all of it, or what it put between tags for that."""
    text = _text(reply)
    tagged = (found.strip() for found in SUMMARY.findall(text))
    return [text, *(one for one in tagged if len(one) >= SUMMARY_CHARS)] if text else []


def _lead(messages: Sequence[Json], chains: Sequence[int]) -> int:
    """What stands for the tools and the system messages at the beginning."""
    return chains[next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))]


def _begins(keys: Sequence[int], node: Node) -> bool:
    return tuple(keys[: len(node.keys)]) == node.keys


def _is_in_order(keys: Sequence[int], whole: Iterator[int]) -> bool:
    return all(any(key == one for one in whole) for key in keys)
