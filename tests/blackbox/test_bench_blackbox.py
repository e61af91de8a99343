"""The bench of agent programs: its parts, and, slow, every program that is installed on its task."""

from __future__ import annotations

import asyncio

import pytest

from forge.bench.blackbox import play, shape
from forge.bench.blackbox_cases import SIDE, SUMMARY, Change, Script, changed, load_cases
from forge.bench.blackbox_faults import Cutter
from forge.blackbox.catalog import PROGRAMS
from forge.blackbox.install import is_installed
from forge.blackbox.recipe import load, program_folder
from forge.domains.registry import get_domain
from forge.gateway.fake_chat import FakeChatCodec, Turn, turns
from forge.gateway.recovery import Conversations, Place
from forge.types import ForgeError, Json

CASES = load_cases()
TASK = get_domain("coding").task("train", 0, 1)
USER = Turn("user", TASK.prompt)


def test_every_recipe_that_ships_has_a_case_but_those_that_vary_another() -> None:
    recipes = {case.recipe for case in CASES.values()}
    assert {load(name).program for name in recipes} == set(PROGRAMS)
    with pytest.raises(ForgeError, match="emacs: no case by that name; there are opencode, "):
        load_cases(["emacs"])


@pytest.mark.parametrize("name", CASES)
def test_a_script_goes_on_from_what_its_prompt_shows(name: str) -> None:
    script = Script(CASES[name], Change(), TASK)
    first = script([USER])
    assert "step-1" in first
    assert first != script([USER, Turn("assistant", first)])
    assert script([Turn("user", "Give this a title")]) == SIDE
    signed = Script(CASES[name], Change(sign="sum up"), TASK)
    assert signed([USER, Turn("assistant", first), Turn("user", "sum up"), Turn("assistant", "")]) == SUMMARY
    assert signed([USER, Turn("user", "sum up"), Turn("assistant", first)]) != SUMMARY


def test_the_policy_reads_its_prompt_as_turns() -> None:
    messages: list[Json] = [{"role": "system", "content": "be"}, {"role": "user", "content": "häy"}]
    assert turns(FakeChatCodec().prompt(messages, [])) == [("system", "be"), ("user", "häy"), ("assistant", "")]


def test_what_a_variant_changes_of_a_recipe() -> None:
    change = Change(environment={"A": "1"}, arguments=("-x",), replace={"32000": "9"})
    one = changed(load("opencode"), change)
    assert one.command[-2:] == ("-x", "$task")
    assert one.environment["A"] == "1"
    assert '"context": 9' in one.home["opencode.json"]


def test_a_tree_in_a_line() -> None:
    tree = Conversations()

    def add(number: int, parent: int | None, messages: list[Json], said: str) -> None:
        place = Place(parent, 0 if parent is None else len(messages) - 1)
        reply: Json = {"role": "assistant", "content": said}
        tree.add(number, place, messages, (), reply=reply, prompt_ids=(1,), sampled_ids=(2,))

    first: list[Json] = [{"role": "user", "content": "do it"}]
    then = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "on"}]
    add(0, None, first, "a")
    add(1, 0, then, "b")
    add(2, 0, then, "c")
    assert shape(tree.nodes) == "root 2 (resample 1)"


@pytest.mark.parametrize("cuts", [0, 1])
async def test_one_answer_is_cut(cuts: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    cutter = Cutter(server.sockets[0].getsockname(), cuts)
    port = int((await cutter.start()).rpartition(":")[2])
    got = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\n\r\n")
        try:
            got.append(len(await reader.read()))
        except ConnectionResetError:
            got.append(0)
        writer.close()
    cutter.stop()
    server.close()
    assert (got[0] < 1000) is bool(cuts)
    assert got[1] == 5019


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
async def test_a_program_that_is_installed_does_its_task(name: str) -> None:
    program = load(CASES[name].recipe).program or ""
    if not is_installed(program_folder(program), PROGRAMS[program]):
        pytest.skip(f"forge blackbox install {program}")
    row = await play(name, CASES[name], "plain")
    assert row.as_expected, row
