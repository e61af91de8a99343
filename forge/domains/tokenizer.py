"""The tiny model's tokenizer: byte-level, no merges, with the words of the domains and of tool calls as one token.

Any text encodes and decodes back. A tool call costs 8 tokens besides its payload and the end of the turn:
`<tool_call>` `{"name":"` calc `","arguments":{"` expression `":"` ... `"}}` `</tool_call>`. Numbers are
cut into pieces of two digits from the left: copying one of a hundred symbols is less ambiguous than one of ten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

#: longest conversation in tokens, prompt and completion together
CONTEXT = 1024
END = "<|im_end|>"
ASSISTANT = "<|assistant|>"
_SPECIAL = ("<|pad|>", END, "<|system|>", "<|user|>", ASSISTANT, "<|tool|>")
# Ordinary added tokens: parsers must find them in text decoded with skip_special_tokens.
_MARKS = ("<tool_call>", "</tool_call>")
_SCAFFOLD = ('{"name":"', '","arguments":{"', '":"', '"}}')
_PIECE = r" ?[A-Za-z]{2,}|[A-Za-z]|\d{1,2}|[^A-Za-z\d]"
_PATTERN = "|".join([*(re.escape(piece) for piece in _SCAFFOLD), _PIECE])
_WORD = re.compile(r" ?[A-Za-z]{2,}")

# `tools` is ignored on purpose: the tiny model learns which tools a domain has by training, and schemas would be
# most of its context. Every turn ends with the end token and nothing after it, so a conversation only ever grows:
# the rendering up to turn k, plus the turn as sampled, is a prefix of the rendering up to turn k + 1.
CHAT_TEMPLATE = """\
{#- `tools` is ignored: the model learns each domain's tools by training. -#}
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{%- set arguments = function.arguments -%}
{%- if arguments is not string -%}{%- set arguments = arguments | tojson(separators=(',', ':')) -%}{%- endif -%}
{{- '<tool_call>{"name":"' ~ function.name ~ '","arguments":' ~ arguments ~ '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def words_of(texts: Iterable[str]) -> list[str]:
    """Every word of two or more letters in `texts`, with its leading space if any, sorted."""
    return sorted({word for text in texts for word in _WORD.findall(text)})


def build_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Ids: special tokens, tool-call marks, scaffold, two-digit pieces, words, then the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = (f"{number:02d}" for number in range(100))
    pieces = [*_SCAFFOLD, *numbers, *(word.replace(" ", "Ġ") for word in words), *alphabet]
    first = len(_SPECIAL) + len(_MARKS)
    vocabulary = {piece: first + index for index, piece in enumerate(dict.fromkeys(pieces))}
    vocabulary |= {token: index for index, token in enumerate((*_SPECIAL, *_MARKS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=_SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer saved in `folder`, without asking any hub."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
