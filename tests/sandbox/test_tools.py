"""The tools: what a model is told, and that nothing it writes raises anything else."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_support import needs_bubblewrap

from forge.domains.base import ToolError
from forge.sandbox.base import Limits, Result
from forge.sandbox.fake import FakeSandbox
from forge.sandbox.tools import TOOLS, told, use

LIMITS = Limits(output_kib=4)


async def test_files_are_written_edited_listed_and_read() -> None:
    sandbox = FakeSandbox()

    async def call(name: str, **arguments: str) -> str:
        return await use(sandbox, name, arguments, LIMITS)

    assert await call("write_file", path="a/b.txt", text="one two") == "a/b.txt written"
    assert await call("edit_file", path="a/b.txt", old="two", new="deux") == "a/b.txt edited"
    assert await call("read_file", path="/workspace/a/b.txt") == "one deux"
    assert await call("list_files") == "a/b.txt 8"
    for old in ("three", "e", ""):
        with pytest.raises(ToolError, match="not once"):
            await call("edit_file", path="a/b.txt", old=old, new="x")
    with pytest.raises(ToolError, match="No such file"):
        await call("read_file", path="c")
    with pytest.raises(ToolError, match=r"\.\./x"):
        await call("write_file", path="../x", text="x")
    sandbox.write("binary", b"\xff")
    with pytest.raises(ToolError, match="not text"):
        await call("read_file", path="binary")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(exit_code=0, output="out\n", cut=False, seconds=0.1), "out"),
        (Result(exit_code=2, output="", cut=False, seconds=0.1), "[exit code 2]"),
        (
            Result(exit_code=None, output="y\n", cut=True, seconds=1.25, met=("output", "disk")),
            "y\n[cut: only the first 4 KiB are shown]\n[ended after 1.2 s]\n[limits met: output, disk]",
        ),
    ],
)
async def test_a_model_is_told_of_a_command_what_is_not_as_usual(result: Result, text: str) -> None:
    assert told(result, LIMITS) == text
    assert await use(FakeSandbox({"x": result}), "bash", {"command": "x"}, LIMITS) == text


@given(
    name=st.sampled_from([tool["function"]["name"] for tool in TOOLS]) | st.text(),
    arguments=st.dictionaries(
        st.sampled_from(["command", "path", "text", "old", "new"]) | st.text(),
        st.text(st.characters()) | st.none() | st.integers() | st.just("a\ud800"),
        max_size=4,
    ),
)
async def test_a_bad_call_is_a_tool_error_and_nothing_else(name: str, arguments: dict[str, Any]) -> None:
    with suppress(ToolError):
        assert isinstance(await use(FakeSandbox(), name, arguments, LIMITS), str)


@needs_bubblewrap
async def test_the_tools_are_served_over_mcp_to_its_own_client(tmp_path: Any) -> None:
    pytest.importorskip("mcp", reason="the extra `agents` is not installed")
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    (tmp_path / "given.txt").write_text("given")
    if os.geteuid() == 0:  # a folder of root's is no workspace
        for parent in [tmp_path, *tmp_path.parents][:-2]:
            parent.chmod(0o755)
        os.chown(tmp_path, 65534, 65534)
    arguments = ["-m", "forge", "sandbox", "mcp", "--workspace", str(tmp_path), "--seconds", "1"]
    parameters = StdioServerParameters(command=sys.executable, args=arguments)
    async with Client(stdio_client(parameters)) as client:
        listed = (await client.list_tools()).tools
        assert [(tool.name, tool.input_schema) for tool in listed] == [
            (tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS
        ]
        await client.call_tool("write_file", {"path": "made.txt", "text": "made"})
        done = await client.call_tool("bash", {"command": "cat given.txt made.txt; pwd"})
        assert (done.is_error, done.content[0].text) == (False, "givenmade/workspace")
        slow = await client.call_tool("bash", {"command": "sleep 60"})
        assert slow.content[0].text.endswith("[limits met: time]")
        wrong = await client.call_tool("read_file", {"path": "/etc/passwd"})
        assert (wrong.is_error, wrong.content[0].text) == (True, "error: /etc/passwd: outside /workspace")
    assert (tmp_path / "made.txt").read_text() == "made"
