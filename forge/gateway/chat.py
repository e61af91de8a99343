"""Chat rendering: messages to prompt ids, sampled ids to text. The only place that knows a model's template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from forge.formats import ToolFormat, ToolStream, tool_prompting
from forge.gateway import conversation
from forge.gateway.chat_template import ChatError, ChatTemplate, read_json
from forge.gateway.prompt_tokens import PromptTokenizer
from forge.gateway.reasoning import CLOSE, OPEN, ReasoningStream
from forge.gateway.tool_text import text_messages
from forge.types import ForgeError, Json


class ChatCodec(Protocol):
    """Between chat and tokens. Messages and tools are in the form of forge.gateway.conversation."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json]) -> tuple[int, ...]:
        """Prompt ids, up to where the assistant's turn begins. Raises ChatError."""
        ...

    def continuation(
        self, before: Sequence[Json], after: Sequence[Json], tools: Sequence[Json], last_id: int
    ) -> tuple[int, ...] | None:
        """Ids between a sampled reply, which ended in `last_id`, and where the next one begins: `before` ends with that
        reply, `after` follows it. None where `before` is shown differently once `after` follows. Raises ChatError."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text that is no conversation. Raises ChatError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, end-of-turn tokens left out, everything else shown as it is."""
        ...

    def tool_stream(self, tools: Sequence[Json] = ()) -> ToolStream:
        """A fresh parser for one reply in the model's tool-call format, to a request with these tools."""
        ...

    def reasoning_stream(self, prompt_ids: Sequence[int]) -> ReasoningStream | None:
        """A fresh splitter for one reply to this prompt; None where the model's template knows no reasoning."""
        ...


class HfChatCodec:
    """A Hugging Face tokenizer folder: `tokenizer.json` and its chat template, read without transformers.

    `tool_prompt` is what forge.formats.tool_prompting reads: "template" hands tools to the template; a format's id,
    such as "hermes", is for templates that know none: tools are described in the system message, calls and results
    become text.
    """

    def __init__(self, tokenizer_dir: Path | str, tool_prompt: str = "template") -> None:
        folder = Path(tokenizer_dir)
        if not (folder / "tokenizer.json").is_file():
            raise ForgeError(f"tokenizer {folder}: no tokenizer.json there; name a folder that has one")
        self._template = ChatTemplate(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokens = PromptTokenizer(self._tokenizer)
        self._by_template, self._format = tool_prompting(tool_prompt)
        self._stop_ids = self._end_of_turn(folder)
        self._stops = frozenset(self._stop_ids)
        self._ends = [str(self._tokenizer.id_to_token(one)) for one in self._stop_ids]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json]) -> tuple[int, ...]:
        return self.encode(self._render(messages, tools))

    def continuation(
        self, before: Sequence[Json], after: Sequence[Json], tools: Sequence[Json], last_id: int
    ) -> tuple[int, ...] | None:
        head = self._render(before, tools, goes_on=False)
        whole = self._render([*before, *after], tools)
        if not whole.startswith(head):
            return None
        cut, end = max((head.rfind(end), end) for end in self._ends)
        behind = cut + len(end)
        if cut < 0 or head[behind:].strip():
            return None  # the template ends turns with something else, so where the reply ends is not to be seen
        return self.encode(whole[behind if self._tokenizer.id_to_token(last_id) == end else cut :])

    def _render(self, messages: Sequence[Json], tools: Sequence[Json], *, goes_on: bool = True) -> str:
        if self._by_template:
            return self._template.render(template_messages(messages), tools, goes_on=goes_on)
        return self._template.render(text_messages(messages, tools, self._format), (), goes_on=goes_on)

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return self._tokens.encode(text)
        except (UnicodeEncodeError, TypeError) as error:  # the tokenizer's word for a string that is no text
            raise ChatError("the messages hold half a surrogate pair, which is no text") from error

    @property
    def shows_tools(self) -> bool:
        """Whether the prompt tells the model of its tools."""
        user = [{"role": "user", "content": "?"}]
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        return self.prompt(user, [tool]) != self.prompt(user, [])

    def unstable(self) -> tuple[str, ...]:
        """After what the template shows an earlier turn differently, so that its ids cannot be repeated; () where it
        never does. Such turns are tokenised anew, and count as forks. What the template refuses is left out."""
        asked, follow = {"role": "user", "content": "a"}, {"role": "user", "content": "c"}
        call = conversation.call("call_0", "f", "{}")
        tool = conversation.tool("f", "d", {"type": "object", "properties": {}})
        probes: dict[str, tuple[list[Json], list[Json]]] = {
            "a user's message": ([asked, conversation.assistant("b")], [follow]),
            "a user's message, where it reasoned": ([asked, conversation.assistant("b", "r")], [follow]),
            "a tool's result": ([asked, conversation.assistant("", "", [call])], [conversation.tool_result("x", "d")]),
        }
        return tuple(what for what, (before, after) in probes.items() if self._differs(before, after, [tool]))

    def _differs(self, before: list[Json], after: list[Json], tools: list[Json]) -> bool:
        try:
            return self.continuation(before, after, tools, self._stop_ids[0]) is None
        except ChatError:
            return False

    def decode(self, ids: Sequence[int]) -> str:
        kept = [index for index in ids if index not in self._stops]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def text(self, ids: Sequence[int]) -> str:
        """All of it, end-of-turn tokens too: for people."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def added_tokens(self) -> frozenset[str]:
        """Texts that are a token whatever stands around them, such as tags."""
        return frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    @property
    def tool_format(self) -> ToolFormat:
        """The format that replies are read in."""
        return self._format

    def tool_stream(self, tools: Sequence[Json] = ()) -> ToolStream:
        return self._format.stream(tools)

    def reasoning_stream(self, prompt_ids: Sequence[int]) -> ReasoningStream | None:
        if not self._template.mentions(CLOSE):
            return None
        return ReasoningStream(opened=self.decode(prompt_ids[-_TAG_TOKENS:]).rstrip().endswith(OPEN))

    def _end_of_turn(self, folder: Path) -> tuple[int, ...]:
        """The tokenizer's end token, and those the model's generation settings name."""
        listed = read_json(folder / "generation_config.json").get("eos_token_id") or []
        ids = set(listed if isinstance(listed, list) else [listed])
        eos = self._tokenizer.token_to_id(self._template.special.get("eos_token", ""))
        ids |= set() if eos is None else {eos}
        if not ids:
            raise ForgeError(f"tokenizer {folder}: no eos_token; a turn would never end. Name one in its config")
        return tuple(sorted(ids))


def template_warning(model: str, codec: HfChatCodec) -> str | None:
    """What whoever trains on conversations should know of a model's chat template; None: nothing."""
    changed = codec.unstable()
    if not changed:
        return None
    return (
        f"{model}: its chat template is not prefix-stable: a turn before {' or before '.join(changed)} is shown "
        "differently from how it was sampled, so it is tokenised anew and counts as a fork (template)"
    )


#: more than any tokenizer makes of an opening tag and the newlines after it
_TAG_TOKENS = 16


def template_messages(messages: Sequence[Json]) -> list[Json]:
    """As templates expect them: arguments as objects, so that `tojson` writes them in the model's own form."""
    return [_with_objects(message) if message.get("tool_calls") else message for message in messages]


def _with_objects(message: Json) -> Json:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": _object_or_text(function["arguments"])}})
    return message | {"tool_calls": calls}


def _object_or_text(arguments: str) -> Json | str:
    """Clients echo broken arguments too; those stay the text they are."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
