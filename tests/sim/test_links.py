"""Laws of shared links, and processor sharing against a plain account of it in fractions."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.types import ForgeError
from sim.alarm import HAPPEN, Alarm
from sim.clock import FS
from sim.links import Links, Wire, wire


@dataclass(frozen=True)
class Sent:
    at: int
    size: int
    ports: tuple[int, ...] = (0,)
    after: int = 0
    cancel: int | None = None


def crossed(bandwidths: list[int], sent: list[Sent], look=None) -> tuple[list[int | None], Links]:
    """When each ends; `look(links)` is called whenever something has happened."""
    env = simpy.Environment()
    links = Links(env, bandwidths)
    ends: list[int | None] = [None] * len(sent)
    made = {}

    def send(i: int) -> None:
        one = sent[i]
        made[i] = links.send(one.ports, one.size, lambda: ends.__setitem__(i, env.now), one.after)

    for i, one in enumerate(sent):
        Alarm(env, HAPPEN, lambda _, i=i: send(i)).set(one.at)
        if one.cancel is not None:
            ring = lambda _, i=i: links.cancel(made[i]) if ends[i] is None else None  # noqa: E731
            Alarm(env, HAPPEN, ring).set(one.at + one.cancel)
    while env._queue:
        env.step()
        if look is not None:
            look(links)
    return ends, links


sizes = st.integers(0, 10_000)
times = st.integers(0, 20).map(lambda n: n * FS // 10)


def of_ports(count: int):
    ports = st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True).map(tuple)
    return st.builds(Sent, at=times, size=sizes, ports=ports, after=st.sampled_from([0, FS // 3]))


sends = st.lists(of_ports(4), max_size=12)
widths = st.lists(st.integers(500, 5000), min_size=4, max_size=4)


@given(st.integers(100, 5000), st.lists(st.builds(Sent, at=times, size=sizes), min_size=1, max_size=10))
@settings(max_examples=150, deadline=None)
def test_one_port_is_processor_sharing(width: int, sent: list[Sent]) -> None:
    """In exact fractions: between two events every transfer under way gets width / n. Rates in whole bytes/s cost at
    most a byte/s of at least width / n."""
    ends, _ = crossed([width], sent)
    left = {i: Fraction(one.size) for i, one in enumerate(sent)}
    clock, expected = Fraction(0), {}
    while left:
        under_way = [i for i in left if sent[i].at <= clock]
        coming = [Fraction(sent[i].at) for i in left if sent[i].at > clock]
        share = Fraction(width, FS * max(1, len(under_way)))
        at = min([clock + left[i] / share for i in under_way] + coming)
        for i in under_way:
            left[i] -= share * (at - clock)
        clock = at
        for i in [i for i in under_way if left[i] <= 0]:
            del left[i]
            expected[i] = clock
    for i, end in enumerate(ends):
        assert end is not None
        slack = (expected[i] - sent[i].at) * Fraction(2 * len(sent), width) * len(sent)
        assert expected[i] - len(sent) <= end <= expected[i] + slack + len(sent)


@given(widths, sends)
@settings(max_examples=150, deadline=None)
def test_everything_arrives_and_nothing_is_faster_than_alone(width: list[int], sent: list[Sent]) -> None:
    ends, links = crossed(width, sent)
    assert links.moved == sum(one.size for one in sent)
    for one, end in zip(sent, ends, strict=True):
        assert end is not None
        assert end >= one.at + one.after - (-one.size * FS // min(width[port] for port in one.ports))


@given(widths, sends)
@settings(max_examples=150, deadline=None)
def test_rates_are_max_min_fair(width: list[int], sent: list[Sent]) -> None:
    """No port is exceeded, and each transfer has one that is used up, on which nobody is faster than it."""

    def look(links: Links) -> None:
        rates = links.rates()
        assert all(sum(rates[port]) <= width[port] for port in rates)
        for transfer in {transfer for on in links._on for transfer in on}:
            assert any(
                width[port] - sum(rates[port]) < len(rates[port])
                and max(rates[port]) - transfer.rate <= len(rates[port])
                for port in transfer.ports
            )

    crossed(width, sent, look)


@given(st.integers(100, 5000), sizes, st.lists(times, min_size=2, max_size=8))
def test_equal_sizes_keep_their_order(width: int, size: int, starts: list[int]) -> None:
    starts.sort()
    ends, _ = crossed([width, width], [Sent(at, size, (0, 1)) for at in starts])
    assert ends == sorted(ends)  # type: ignore[type-var]


@given(widths, sends, st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_one_port_with_more_bandwidth_is_never_slower(width: list[int], sent: list[Sent], more: int) -> None:
    """Of one port: on several, who is sooner at another may meet more there."""
    alone = [Sent(one.at, one.size) for one in sent]
    slower, faster = crossed(width[:1], alone)[0], crossed([width[0] + more * 10], alone)[0]
    for before, after, one in zip(slower, faster, alone, strict=True):
        assert before is not None
        assert after is not None
        assert after <= before + (before - one.at) * len(alone) ** 2 // width[0] + len(alone)


def test_a_cancelled_transfer_leaves_its_share() -> None:
    second = FS
    ends, links = crossed([1000], [Sent(0, 1000), Sent(0, 1000, cancel=second // 2)])
    assert ends == [second * 5 // 4, None]  # 250 bytes of half a second at half the rate, the rest at all of it
    assert links.moved == 1000


def test_an_end_may_begin_the_next() -> None:
    env = simpy.Environment()
    links, ends = Links(env, [1000]), []

    def again() -> None:
        ends.append(env.now)
        if len(ends) < 3:
            links.send((0,), 500, again)

    links.send((0,), 500, again)
    env.run()
    assert ends == [FS // 2, FS, FS * 3 // 2]


def test_blocks_cost_what_their_messages_take() -> None:
    """FIELD: the larger the blocks, the fewer messages."""
    small, large = (wire(block, 1000.0, 1e9, 1e-4, 1e-3) for block in (16, 64))
    assert small == Wire(block=16, token_bytes=1000, block_bytes=100_000, latency_fs=10**12)
    assert small.size(5000) == 5_000_000 + 313 * 100_000
    assert large.size(5000) == 5_000_000 + 79 * 100_000


def test_no_bandwidth_is_refused() -> None:
    with pytest.raises(ForgeError, match="bandwidth = 0"):
        Links(simpy.Environment(), [1, 0])
