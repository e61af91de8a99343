"""The agent programs of others that `forge blackbox install` knows, pinned. All are run as they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to install from a package registry, and what shows that it is there, both within the program's folder.

    `setup`: scripts of the packages themselves that npm leaves out and without which they do not start.
    """

    packages: tuple[str, ...]
    shows: str

    @property
    def version(self) -> str:
        """Of its package; of each, by name, where it has several."""
        parts = [package.rpartition("==" if "==" in package else "@")[::2] for package in self.packages]
        return parts[0][1] if len(parts) == 1 else ", ".join(" ".join(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgram(Program):
    setup: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonProgram(Program):
    shows: str = "bin/python"


PROGRAMS: dict[str, Program] = {
    "opencode": NodeProgram(
        packages=("opencode-ai@1.18.33",),
        shows="node_modules/.bin/opencode",
        setup=("node_modules/opencode-ai/postinstall.mjs",),
    ),
    "codex": NodeProgram(packages=("@openai/codex@0.171.0",), shows="node_modules/.bin/codex"),
    "claude-code": NodeProgram(
        packages=("@anthropic-ai/claude-code@2.1.197",),
        shows="node_modules/.bin/claude",
        setup=("node_modules/@anthropic-ai/claude-code/install.cjs",),
    ),
    "qwen-code": NodeProgram(packages=("@qwen-code/qwen-code@0.15.10",), shows="node_modules/.bin/qwen"),
    "pi": NodeProgram(packages=("@mariozechner/pi-coding-agent@0.73.1",), shows="node_modules/.bin/pi"),
    "mini-swe-agent": PythonProgram(packages=("mini-swe-agent==2.4.6",), shows="bin/mini"),
    "aider": PythonProgram(packages=("aider-chat==0.86.2",), shows="bin/aider"),
    "openai-agents": PythonProgram(packages=("openai-agents==0.24.0",)),
    "smolagents": PythonProgram(packages=("smolagents[openai]==1.26.0",)),
    "langchain": PythonProgram(packages=("langchain==1.5.0", "langgraph==1.2.22", "langchain-openai==1.7.4")),
    "pydantic-ai": PythonProgram(packages=("pydantic-ai-slim[openai]==2.68.0",)),
    "autogen": PythonProgram(packages=("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
    "crewai": PythonProgram(packages=("crewai==1.15.30",)),
    "sdks": PythonProgram(packages=("openai==3.51.0", "anthropic==2.10.0")),
}
