"""Recorded workloads: the laws of paths, compression, causality, what is seen of a format, errors with their line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge import trace as ev
from forge.types import ForgeError
from sim.sessions import Session, Step, Trace
from sim.traces import claude_code_files, load
from sim.traces.prefixes import HashTrie, Prefixes, with_answer

DATA = Path(__file__).parents[3] / "shared" / "data"
MOONCAKE = DATA / "mooncake" / "conversation_trace.jsonl"
CLAUDE = DATA / "claude_code_traces"


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"{path}: absent")


def check(block: int, sessions: Iterable[Session]) -> None:
    """The laws of `sim.sessions`, over sessions in order."""
    lengths: dict[int, int] = {}
    for session in sessions:
        for i, step in enumerate(session.steps):
            assert step.prompt >= 1
            assert step.output >= 1
            assert step.delay_s >= 0
            assert all(0 <= j < i for j in step.after)
            total = sum(blocks for _, blocks in step.path)
            assert total <= step.prompt // block
            assert all(blocks > 0 for _, blocks in step.path[:-1])
            for chain, blocks in step.path:
                assert blocks >= lengths.get(chain, 0), "a chain became shorter"
                lengths[chain] = blocks
            if step.keep:
                chain, blocks = step.path[-1]
                lengths[chain] = blocks + (step.prompt + step.output) // block - total


def expand(path: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return [(chain, i) for chain, blocks in path for i in range(blocks)]


# --- chains ------

#: few hashes and short lists, so that prefixes collide in every way
hash_lists = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=12)


@given(hash_lists)
def test_compression_reconstructs_the_hash_lists(lists: list[list[int]]) -> None:
    """A block of a chain is one prefix of hashes, and the other way round."""
    prefixes = Prefixes(count())
    trie = HashTrie(prefixes)
    numbers = [trie.add(hashes) for hashes in lists]
    meaning: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, hashes in zip(numbers, lists, strict=True):
        blocks = expand(prefixes.path(number))
        assert len(blocks) == len(hashes)
        for i, block in enumerate(blocks):
            assert meaning.setdefault(block, tuple(hashes[: i + 1])) == tuple(hashes[: i + 1])
    assert len(set(meaning.values())) == len(meaning)


@given(hash_lists)
def test_chains_never_become_shorter_and_are_not_cut_without_need(lists: list[list[int]]) -> None:
    prefixes = Prefixes(count())
    trie = HashTrie(prefixes)
    numbers = [trie.add(hashes) for hashes in lists]
    steps = tuple(
        Step(prompt=max(1, len(hashes)), output=1, path=prefixes.path(number))
        for number, hashes in zip(numbers, lists, strict=True)
    )
    check(1, [Session(name="all", start_s=0.0, steps=steps)])
    distinct = {tuple(hashes[:n]) for hashes in lists for n in range(1, len(hashes) + 1)}
    chains = {chain for step in steps for chain, _ in step.path}
    assert len(chains) <= len(distinct)
    if len(distinct) == max(map(len, lists)) and lists == sorted(lists, key=len):
        assert len(chains) <= 1, "prefixes of one another in rising length are one chain"


@given(hash_lists)
def test_shared_is_the_longest_common_prefix(lists: list[list[int]]) -> None:
    prefixes = Prefixes(count())
    trie = HashTrie(prefixes)
    numbers = [trie.add(hashes) for hashes in lists]
    for a, one in zip(numbers, lists, strict=True):
        for b, two in zip(numbers, lists, strict=True):
            common = next(
                (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two))
            )
            assert prefixes.shared(a, b) == common


def test_sharing_more_than_there_is_is_refused() -> None:
    prefixes = Prefixes(count())
    prefixes.add(0, 0, 3)
    with pytest.raises(ValueError, match="cannot share 4 of 5 blocks"):
        prefixes.add(0, 4, 5)


def test_an_answer_goes_where_the_next_prompt_has_it() -> None:
    assert with_answer(((1, 4),), ((1, 9),), 5) == ((1, 4),)
    assert with_answer(((1, 4),), ((1, 9),), 6) is None
    assert with_answer(((1, 4),), ((1, 4), (2, 3)), 3) == ((1, 4), (2, 0))
    assert with_answer(((1, 4),), ((1, 4), (2, 3)), 4) is None
    assert with_answer(((1, 4),), ((3, 9),), 1) is None
    assert with_answer((), ((3, 9),), 9) == ((3, 0),)


# --- mooncake ------


def mooncake_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(t: float, prompt: int, hashes: list[int], output: int = 3) -> dict[str, Any]:
    return {"timestamp": t, "input_length": prompt, "output_length": output, "hash_ids": hashes}


def test_mooncake_sorts_scales_and_leaves_out_the_block_that_is_not_full(tmp_path: Path) -> None:
    path = mooncake_file(tmp_path, [ask(5000, 25, [1, 2, 9]), ask(1000, 20, [1, 2]), ask(3000, 15, [1, 7], output=1)])
    trace = load(path, speed=2.0, block=10)
    first, second, third = trace.sessions()
    assert [first.start_s, second.start_s, third.start_s] == [0.0, 1.0, 2.0]
    # The second stops short in what the first has: a cut after one block, and none after two.
    assert expand(first.steps[0].path) == expand(third.steps[0].path)
    assert len(first.steps[0].path) == 2
    assert second.steps[0].path == first.steps[0].path[:1]
    assert second.steps[0].output == 1
    check(trace.block, trace.sessions())


@needs(MOONCAKE)
def test_mooncake_has_the_published_hit() -> None:
    """With room for everything; of a prompt that is known in full its last token is computed again."""
    trace = load(MOONCAKE)
    check(trace.block, trace.sessions())
    stored: dict[int, int] = {}
    hit = total = requests = pairs = 0
    for session in trace.sessions():
        (step,) = session.steps
        found = 0
        for chain, blocks in step.path:
            found += min(blocks, stored.get(chain, 0))
            if stored.get(chain, 0) < blocks:
                break
        for chain, blocks in step.path:
            stored[chain] = max(blocks, stored.get(chain, 0))
        hit += min(found, (step.prompt - 1) // trace.block) * trace.block
        total += step.prompt
        requests += 1
        pairs += len(step.path)
    assert requests == 12031
    assert hit / total == pytest.approx(0.374, abs=0.001)
    assert pairs / requests < 3


# --- azure ------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


def test_azure_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(AZURE + "2023-11-16 18:17:05.9799600,31,0\n")
    one, two = load(path, speed=4.0).sessions()
    assert (one.start_s, two.start_s) == (0.0, pytest.approx(0.5))
    assert one.steps == (Step(prompt=4808, output=10),)
    assert two.steps == (Step(prompt=31, output=1),)


# --- Claude Code ------

HEADER = "trace,agent,req,t,type,in,out,n_blocks,lcp_prev,lcp_best,api_time,think_time,stop\n"


def claude_file(folder: Path, rows: list[str]) -> Path:
    path = folder / "requests.csv"
    path.write_text(HEADER + "".join(row + "\n" for row in rows))
    return path


#: main 0 -> two agents at once, the second of which runs on -> main 1 forks at block 5 -> main 2 returns to main 0's
FORK = [
    "s,main,0,0,n,640,64,10,0,0,2,0,tool_use",
    "s,main/a,0,0,n,320,64,5,0,0,3,0,tool_use",
    "s,main/a,1,4,n,640,64,10,5,5,2,1,end_turn",
    "s,main/b,0,0,n,330,64,5,0,3,90,0,end_turn",
    "s,main,3,10,n,832,0,13,5,5,1,8,tool_use",
    "s,main,4,100,n,768,9,12,5,10,,89,",
]


def test_claude_code_waits_for_those_who_had_ended(tmp_path: Path) -> None:
    trace = load(claude_file(tmp_path, FORK))
    (session,) = trace.sessions()
    check(64, [session])
    main, a0, a1, b0, main1, main2 = session.steps
    assert (main.after, main.delay_s) == ((), 0.0)
    assert (a0.after, b0.after) == ((0,), (0,))
    assert (a1.after, a1.delay_s) == ((1,), 1.0)
    assert main1.after == (0, 2), "a ended at 8 s, b at 92 s: the request at 10 s waits for a alone"
    assert main1.delay_s == pytest.approx(10 - 8)
    assert main1.output == 1
    assert (main2.after, main2.delay_s) == ((4,), pytest.approx(89.0))
    assert expand(main2.path)[:10] == expand(main.path)
    assert expand(main1.path)[:5] == expand(main.path)[:5]
    assert expand(main1.path)[5] not in expand(main.path)
    assert expand(b0.path)[:3] == expand(a1.path)[:3], "sub-agents begin like one another"
    assert a0.keep
    assert not main.keep, "the next prompt leaves this one in its middle"


def test_claude_code_caps_waits_and_spaces_sessions(tmp_path: Path) -> None:
    other = ["u" + row[1:] for row in FORK]
    one, two = load(claude_file(tmp_path, FORK + other), think_cap_s=1.5, every_s=60.0).sessions()
    assert max(step.delay_s for step in one.steps) == 1.5
    assert (one.start_s, two.start_s) == (0.0, 60.0)
    assert not {c for s in one.steps for c, _ in s.path} & {c for s in two.steps for c, _ in s.path}


def raw_session(scope: str) -> dict[str, Any]:
    def entry(t: float, prompt: int, hashes: list[int]) -> dict[str, Any]:
        return {"t": t, "type": "n", "in": prompt, "out": 8, "hash_ids": hashes, "api_time": 1.0}

    inner = {
        "t": 5.0,
        "type": "subagent",
        "agent_id": "x",
        "requests": [entry(5.0, 20, [1, 8]), entry(7.0, 30, [1, 8, 9])],
    }
    requests = [entry(0.0, 25, [1, 2, 3]), inner, entry(9.0, 40, [1, 2, 3, 4])]
    return {"id": "s", "block_size": 10, "hash_id_scope": scope, "requests": requests}


def test_claude_code_whole_sessions_share_what_their_ids_say(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(raw_session("local")))
    one, two = load(tmp_path).sessions()
    check(10, [one, two])
    main, x0, x1, main1 = one.steps
    assert (x0.after, x0.delay_s) == ((0,), 4.0)
    assert (x1.after, x1.delay_s) == ((1,), 1.0)
    assert (main1.after, main1.delay_s) == ((0, 2), 1.0)
    assert expand(x0.path)[0] == expand(main.path)[0]
    assert not set(expand(main.path)) & set(expand(two.steps[0].path)), "local ids mean nothing elsewhere"
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(raw_session("global")))
    one, two = load(tmp_path).sessions()
    assert expand(one.steps[3].path) == expand(two.steps[3].path)


@needs(CLAUDE / "requests.csv")
def test_claude_code_table_agrees_with_the_hashes() -> None:
    """What lcp_prev and lcp_best leave open is guessed; the 14 sessions that have hashes say how well."""
    tables = {recording.name: recording for recording in claude_code_files.read(CLAUDE)}
    whole = claude_code_files.read(CLAUDE / "raw")
    same = pairs = 0
    for recording in whole[:10]:
        table = tables[recording.name]
        for b in range(len(recording.asks)):
            for a in range(b):
                pairs += 1
                same += table.prefixes.shared(a, b) == recording.prefixes.shared(a, b)
    assert same / pairs > 0.99


@needs(CLAUDE / "requests.csv")
def test_claude_code_sessions_keep_the_laws() -> None:
    trace = load(CLAUDE, think_cap_s=60.0)
    sessions = list(trace.sessions())
    assert (len(sessions), sum(len(session.steps) for session in sessions)) == (447, 33250)
    check(trace.block, sessions)
    assert sum(len(step.after) > 1 for session in sessions for step in session.steps) > 15


# --- our own runs ------


def run_events(members: dict[int, list[tuple[float, int, float, int]]]) -> list[ev.Event]:
    """One item; of each member (routed, prompt, completed, tokens)."""
    events: list[ev.Event] = [ev.Submitted(t=1.0, position=0, domain="d", difficulty=0.0, members=len(members))]
    for member, asks in members.items():
        for turn, (routed, prompt, completed, tokens) in enumerate(asks):
            name = f"{member}-{turn}"
            events.append(
                ev.Routed(
                    t=routed, request=name, position=0, member=member, turn=turn, prompt_tokens=prompt, instance=0
                )
            )
            events.append(ev.Completed(t=completed, request=name, tokens=tokens, finish="stop", versions=(0, 0)))
    start = ev.RunStarted(t=0.0, schema=ev.SCHEMA, world="sim", scenario="s", seed=0)
    return [start, *sorted(events, key=lambda event: event.t)]


def run_folder(folder: Path, events: list[ev.Event]) -> Trace:
    (folder / "trace.jsonl").write_text("".join(ev.encode(event) + "\n" for event in events))
    return load(folder, block=10)


def test_run_folder_shares_the_first_prompt_and_grows(tmp_path: Path) -> None:
    members = {0: [(2.0, 45, 3.0, 12), (7.5, 70, 9.0, 5)], 1: [(1.0, 45, 2.0, 30), (4.0, 50, 5.0, 1)]}
    one, two = run_folder(tmp_path, run_events(members)).sessions()
    check(10, [one, two])
    assert [step.delay_s for step in one.steps] == [1.0, 4.5]
    assert [step.after for step in one.steps] == [(), (0,)]
    assert one.steps[0].path[0] == two.steps[0].path[0] == (0, 4)
    assert one.steps[0].keep
    assert [blocks for _, blocks in one.steps[1].path] == [4, 3]
    assert one.steps[0].path[1][0] == one.steps[1].path[1][0]
    # 50 tokens cannot contain 45 and an answer of 30: a rewritten context on a new chain, behind the group's prompt.
    assert not two.steps[0].keep
    assert two.steps[1].path[0] == (0, 4)
    assert two.steps[1].path[1][0] != two.steps[0].path[1][0]


asks = st.lists(
    st.tuples(st.floats(0, 9), st.integers(1, 99), st.floats(0, 9), st.integers(0, 40)), min_size=0, max_size=5
)


@given(st.lists(asks, min_size=1, max_size=3).filter(any))
def test_run_folder_keeps_the_laws(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    members = {}
    for member, rows in enumerate(drawn):
        t, members[member] = 1.0, []
        for wait, prompt, span, tokens in rows:
            members[member].append((t + wait, prompt, t + wait + span, tokens))
            t += wait + span + 1e-3
    trace = run_folder(tmp_path_factory.mktemp("run"), run_events(members))
    sessions = list(trace.sessions())
    check(10, sessions)
    assert sum(len(session.steps) for session in sessions) == sum(map(len, drawn))
    assert all(j == i - 1 for s in sessions for i, step in enumerate(s.steps) for j in step.after)
    assert all(a.start_s <= b.start_s for a, b in pairwise(sessions))


def test_a_run_without_an_answer_says_so(tmp_path: Path) -> None:
    events = [event for event in run_events({0: [(1.0, 20, 2.0, 3)]}) if not isinstance(event, ev.Completed)]
    with pytest.raises(ForgeError, match="of 1 items no request was answered to its end; give a run that served some"):
        run_folder(tmp_path, events)


# --- errors ------

ROW = "s,main,1,9,n,640,64,10,10,10,2,0,tool_use"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty.jsonl", "\n", "empty.jsonl: empty"),
        ("some.txt", "hello there", "some.txt:1: the format cannot be seen from 'hello there'"),
        ("m.jsonl", json.dumps(ask(0, 512, [1])) + "\n{oops", "m.jsonl:2: not JSON"),
        ("m.jsonl", json.dumps(ask(0, 1024, [1])), r"m.jsonl:1: hash_ids = \[1\]: 1 of them, but the prompt has 2"),
        ("m.jsonl", json.dumps(ask(0, 0, [1])), "m.jsonl:1: input_length = 0: must be a whole number, at least 1"),
        (
            "m.jsonl",
            json.dumps(ask(0, 9, [1], output=0)),
            "m.jsonl:1: output_length = 0: must be a whole number, at least 1",
        ),
        (
            "m.jsonl",
            json.dumps(ask(0, 9, [1])) + "\n" + json.dumps(ask(-5, 9, [1])),
            "m.jsonl:2: timestamp = -5: must be",
        ),
        ("m.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 1}', "m.jsonl:1: hash_ids is missing"),
        ("m.jsonl", json.dumps(ask(0, 9, [1]) | {"hash_ids": None}), "m.jsonl:1: hash_ids = None: must be a list"),
        ("m.jsonl", json.dumps(ask(0, 9, [True])), r"m.jsonl:1: hash_ids = \[True\]"),
        ("m.jsonl", '{"timestamp": 0, "hash_ids": []}', "m.jsonl:1: input_length is missing"),
        ("a.csv", AZURE + "yesterday,1,1", "a.csv:3: TIMESTAMP = 'yesterday': must be a time"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,many,1", "a.csv:3: ContextTokens = 'many'"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,4", "a.csv:3: not as many fields"),
        ("a.csv", "ContextTokens\n1", "a.csv:1: no column TIMESTAMP, GeneratedTokens"),
        ("a.csv", AZURE.splitlines()[0], "a.csv: no requests in it"),
        ("c.csv", HEADER + FORK[0] + "\n" + ROW.replace(",10,10,10,", ",10,11,10,"), "c.csv:3: lcp_best = '10'"),
        ("c.csv", HEADER + FORK[0] + "\n" + ROW.replace(",10,10,10,", ",11,10,10,"), "c.csv:3: n_blocks = '11'"),
        ("c.csv", HEADER + ROW, "c.csv:2: lcp_prev = '10': more blocks than the previous"),
        (
            "c.csv",
            HEADER + FORK[0] + "\n" + ROW.replace(",10,10,10,", ",10,4,9,"),
            "c.csv:3: lcp_best = '9': no earlier",
        ),
        (
            "s.json",
            json.dumps({**raw_session("local"), "requests": [{}]}),
            r"s.json: requests\[0\]: hash_ids is missing",
        ),
        ("s.json", json.dumps({**raw_session("local"), "block_size": 0}), "s.json: block_size = 0"),
        (
            "r.jsonl",
            '{"t":0,"e":"run_started","schema":0,"world":"sim","scenario":"s","seed":0}\n',
            "r.jsonl:1: a trace of",
        ),
    ],
)
def test_bad_files_are_errors_of_one_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ForgeError, match=says) as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_bad_requests_are_errors(tmp_path: Path) -> None:
    path = mooncake_file(tmp_path, [ask(0, 512, [1])])
    with pytest.raises(ForgeError, match="no such file"):
        load(tmp_path / "nothing")
    with pytest.raises(ForgeError, match="format = 'parquet': no such format; known are mooncake"):
        load(path, "parquet")
    with pytest.raises(ForgeError, match="think_cap_s: no option of format mooncake; its options are speed, block"):
        load(path, think_cap_s=1.0)
    with pytest.raises(ForgeError, match="speed = 0: must be a number above 0"):
        load(path, speed=0)
    with pytest.raises(ForgeError, match="every_s = -1"):
        load(claude_file(tmp_path, FORK), every_s=-1)
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(ForgeError, match="holds neither"):
        load(folder)
