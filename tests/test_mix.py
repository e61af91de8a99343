from hypothesis import given
from hypothesis import strategies as st

from forge.mix import Mix

weights = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10), min_size=1)


@given(weights, st.integers(1, 300))
def test_counts_stay_within_one_of_their_share_for_any_run_of_positions(weights: dict[str, float], n: int) -> None:
    mix = Mix(weights)
    total = sum(weights.values())
    drawn = [mix.domain(i) for i in range(2 * n)]
    for start in (0, n // 2, n):
        window = drawn[start : start + n]
        for name, weight in weights.items():
            # Both ends of a window are within 1 of the running share in theory; smooth round robin gives under 2 here.
            assert abs(window.count(name) - n * weight / total) < len(weights)


@given(weights, st.integers(0, 200))
def test_a_position_has_one_domain_whatever_was_asked_before(weights: dict[str, float], position: int) -> None:
    ahead = Mix(weights)
    ahead.domain(position + 50)
    assert ahead.domain(position) == Mix(weights).domain(position)


def test_known_sequence() -> None:
    mix = Mix({"a": 2, "b": 1})
    assert [mix.domain(i) for i in range(6)] == ["a", "b", "a", "a", "b", "a"]
