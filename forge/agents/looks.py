"""What a scaffold asks of a model, for people: an opening, a call, what comes back."""

from __future__ import annotations

import json

from forge.agents.dialects import Result, dialect_of
from forge.agents.episode import offered_tools, opening_of
from forge.agents.loops import DELEGATE
from forge.domains.registry import get_domain
from forge.formats import ToolCall
from forge.formats import get as get_format
from forge.scaffolds import LOOPS, STRATEGIES, STYLES, Scaffold


def looks(scaffold: Scaffold, domain_name: str) -> dict[str, str]:
    """Texts by what they are, for a task of the domain. Raises ForgeError for an unknown one."""
    domain = get_domain(domain_name)
    task, style = domain.task("train", 0, 0), STYLES[scaffold.style]
    dialect = dialect_of(scaffold, tells=style.tells)
    tools = offered_tools(scaffold, [DELEGATE] if scaffold.loop == "delegate" else domain.tools(task))
    loop, strategy = LOOPS[scaffold.loop], scaffold.strategy
    rule = next(text for key, text in STRATEGIES.items() if key.partition("-")[0] == strategy.kind)
    call = ToolCall("lookup", '{"key":"apple"}')
    shown = dialect.bring([Result(call, "call_0", "23")], ())
    said = get_format(scaffold.format).render("", [call]) if scaffold.format else "as the model's server reads it"
    messages = opening_of(scaffold, dialect, task, tools, loop.told)
    return {
        "scaffold": scaffold.id,
        "loop": loop.summary,
        "context": rule,
        "style": style.summary,
        "for a model like quickstart": "yes" if scaffold.is_small else "no",
        "opening": "\n".join(f"[{one['role']}] {one['content']}" for one in messages),
        "tools in the request": json.dumps([tool["function"]["name"] for tool in tools])
        if not scaffold.format
        else "none",
        "a call": said,
        "its result": "\n".join(f"[{one.message['role']}] {one.message['content']}" for one in shown),
    }
