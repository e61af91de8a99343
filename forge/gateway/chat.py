"""Chat rendering: messages to prompt ids, sampled ids to text. The only place that knows a model's template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from tokenizers import Tokenizer

from forge.gateway import conversation, tool_format
from forge.gateway.chat_template import ChatError, ChatTemplate, read_json
from forge.gateway.prompt_tokens import PromptTokenizer
from forge.gateway.reasoning import CLOSE, OPEN, ReasoningStream
from forge.gateway.tool_format import HermesStream, ToolCall, ToolStream
from forge.types import ForgeError, Json

ToolPrompt = Literal["template", "hermes"]


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

    def tool_stream(self) -> ToolStream:
        """A fresh parser for one reply in the model's tool-call format."""
        ...

    def reasoning_stream(self, prompt_ids: Sequence[int]) -> ReasoningStream | None:
        """A fresh splitter for one reply to this prompt; None where the model's template knows no reasoning."""
        ...


class HfChatCodec:
    """A Hugging Face tokenizer folder: `tokenizer.json` and its chat template, read without transformers.

    `tool_prompt="template"` hands tools to the template; "hermes" is for templates that know none: tools are
    described in the system message, calls and results become text.
    """

    def __init__(self, tokenizer_dir: Path | str, tool_prompt: ToolPrompt = "template") -> None:
        folder = Path(tokenizer_dir)
        if not (folder / "tokenizer.json").is_file():
            raise ForgeError(f"tokenizer {folder}: no tokenizer.json there; name a folder that has one")
        self._template = ChatTemplate(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokens = PromptTokenizer(self._tokenizer)
        self._messages = hermes_messages if tool_prompt == "hermes" else template_messages
        self._describe_tools = tool_prompt == "template"
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
        described = tools if self._describe_tools else ()
        return self._template.render(self._messages(messages, tools), described, goes_on=goes_on)

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

    def tool_stream(self) -> ToolStream:
        return HermesStream()

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


def template_messages(messages: Sequence[Json], _tools: Sequence[Json]) -> list[Json]:
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


def hermes_messages(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """For templates without tools: tools in the system message, calls in the text, results as user turns."""
    out: list[Json] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += "\n" + result
            else:
                out.append({"role": "user", "content": result, "results": True})
        else:
            text = {"role": role, "content": _with_calls(content, message.get("tool_calls"))}
            thought = message.get("reasoning_content")
            out.append(text | {"reasoning_content": thought} if thought else text)
    return _with_tool_prompt(out, tools) if tools else out


def _with_calls(content: str, calls: Sequence[Json] | None) -> str:
    if not calls:
        return content
    functions = [call["function"] for call in calls]
    return tool_format.render(content, [ToolCall(f["name"], f["arguments"] or "{}") for f in functions])


def _with_tool_prompt(messages: list[Json], tools: Sequence[Json]) -> list[Json]:
    listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = HERMES_PROMPT.format(tools=listing)
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{prompt}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


HERMES_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> tags:
<tool_call>{{"name":<function-name>,"arguments":<args-json-object>}}</tool_call>"""
