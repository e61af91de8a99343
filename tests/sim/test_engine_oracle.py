"""The oracle of one instance on cases worked out by hand, and its own invariants on random workloads.

In all hand-made cases a block has 4 tokens. Unless a case says otherwise an iteration takes 10, so that the times of
iterations can be counted off: one that begins at 0 ends at 10. "kv" is what a request holds, "s" what it has sampled.
"""

from __future__ import annotations

import pytest
from engine_oracle import Load, OracleInstance, OracleRequest, OracleResult
from hypothesis import given, settings
from hypothesis import strategies as st

A, B, C, S = 1, 2, 3, 4
Call = tuple[int, int, list[tuple[int, int]]]


def request(
    identity: int,
    arrival: int,
    prompt: int,
    output: int,
    *path: tuple[int, int],
    keep: bool = False,
) -> OracleRequest:
    """A request whose path is written out as arguments."""
    return OracleRequest(identity, arrival, prompt, output, path, keep)


def serve(
    *requests: OracleRequest,
    capacity: int = 100,
    budget: int = 100,
    max_seqs: int = 100,
    loads: tuple[Load, ...] = (),
    cancels: tuple[tuple[int, int], ...] = (),
) -> tuple[OracleResult, list[Call]]:
    """Serve requests in blocks of 4 tokens and iterations of 10; also every call of the cost."""
    calls: list[Call] = []

    def cost(decodes: int, context: int, chunks: list[tuple[int, int]]) -> int:
        calls.append((decodes, context, list(chunks)))
        return 10

    instance = OracleInstance(4, capacity, budget, max_seqs, cost)
    return instance.run(requests, loads, cancels, record=True), calls


def times(result: OracleResult, identity: int) -> tuple[int | None, int | None]:
    """(first token, end) of a request."""
    return result.requests[identity].first_token, result.requests[identity].end


# Iterations.


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    # 10 tokens with a budget of 4: chunks 4, 4, 2 from 5 to 35; then two decodes, which hold 10 and 11 before.
    result, calls = serve(request(0, 5, 10, 3), budget=4)
    assert calls == [(0, 0, [(4, 0)]), (0, 0, [(4, 4)]), (0, 0, [(2, 8)]), (1, 10, []), (1, 11, [])]
    assert times(result, 0) == (35, 55)
    assert (result.iterations, result.busy) == (5, 50)
    assert (result.prefill_tokens, result.decode_tokens) == (10, 2)
    assert result.requests[0].sampled == 3
    assert result.stored == {}
    # kv 4, 8, 10, 11, 12 after the plans, then none: 1, 2, 3, 3, 3 blocks.
    assert [(boundary.time, boundary.used) for boundary in result.log] == [
        (5, 1),
        (15, 2),
        (25, 3),
        (35, 3),
        (45, 3),
        (55, 0),
    ]


def test_decodes_and_chunks_share_the_budget() -> None:
    # Budget 4. Plan 1: request 0 takes 2, request 1 the 2 left. Plan 2: 1 decode (kv 2), 3 left: chunk 3 after 2.
    # Plan 3: decode (kv 3), the last 2 after 5: first token at 30. Plan 4: decodes of kv 4 and 7.
    result, calls = serve(request(0, 0, 2, 4), request(1, 0, 7, 2), budget=4)
    assert calls == [(0, 0, [(2, 0), (2, 0)]), (1, 2, [(3, 2)]), (1, 3, [(2, 5)]), (2, 11, [])]
    assert times(result, 0) == (10, 40)
    assert times(result, 1) == (30, 40)


def test_a_prefill_under_way_keeps_the_next_request_out() -> None:
    # Budget 4. Request 0 needs 4 + 1: in its second iteration it completes, and 3 tokens are left for request 1.
    # Request 1 completes in that iteration; request 2 finds no budget and comes in the third.
    result, calls = serve(request(0, 0, 5, 1), request(1, 0, 3, 1), request(2, 0, 1, 1), budget=4)
    assert calls == [(0, 0, [(4, 0)]), (0, 0, [(1, 4), (3, 0)]), (0, 0, [(1, 0)])]
    assert [times(result, i) for i in range(3)] == [(20, 20), (20, 20), (30, 30)]


def test_decodes_that_use_the_budget_up_keep_others_out() -> None:
    # Budget 1: requests 0 and 1 (prompt 1, output 4 and 2) come one by one. At 10: 1 decode uses the budget up, so
    # request 1 waits for the end of request 0 at 40; first token at 50, end at 60.
    result, _ = serve(request(0, 0, 1, 4), request(1, 0, 1, 2), budget=1)
    assert times(result, 0) == (10, 40)
    assert times(result, 1) == (50, 60)


def test_at_most_max_seqs_run() -> None:
    # One at a time: 2 iterations each.
    result, _ = serve(request(0, 0, 1, 2), request(1, 0, 1, 2), request(2, 0, 1, 2), max_seqs=1)
    assert [times(result, i) for i in range(3)] == [(10, 20), (30, 40), (50, 60)]


def test_an_output_of_one_token_ends_with_the_prefill() -> None:
    # kv at the end is 8 + 1 - 1 = 8: both full blocks are kept.
    result, calls = serve(request(0, 3, 8, 1, (S, 0), keep=True))
    assert calls == [(0, 0, [(8, 0)])]
    assert times(result, 0) == (13, 13)
    assert result.decode_tokens == 0
    assert result.stored == {S: 2}


def test_an_iteration_that_began_is_not_changed() -> None:
    # Request 1 arrives at 1 and is planned at 10, though the instance has room for it at once.
    result, _ = serve(request(0, 0, 1, 3), request(1, 1, 1, 1))
    assert times(result, 1) == (20, 20)


# Hits.


def test_a_stored_path_is_hit_in_full() -> None:
    # The first stores A's 2 blocks; of the second's 9 tokens 1 is left.
    result, calls = serve(request(0, 0, 9, 1, (A, 2)), request(1, 50, 9, 1, (A, 2)))
    assert calls == [(0, 0, [(9, 0)]), (0, 0, [(1, 8)])]
    assert [result.requests[i].hit_tokens for i in (0, 1)] == [0, 8]
    assert result.prefill_tokens == 10
    assert result.stored == {A: 2}


def test_a_path_is_hit_up_to_the_first_block_missing() -> None:
    # Stored: A 2, B 1. The path (A, 3), (C, 1) ends its hit within A, after 2 blocks; 17 - 8 tokens are left.
    result, calls = serve(request(0, 0, 13, 1, (A, 2), (B, 1)), request(1, 50, 17, 1, (A, 3), (C, 1)))
    assert calls[1] == (0, 0, [(9, 8)])
    assert result.requests[1].hit_tokens == 8
    assert result.stored == {A: 3, B: 1, C: 1}


def test_the_last_token_is_never_hit() -> None:
    # T = 8: at most 7 // 4 = 1 block is hit; the second is computed in place and is not there twice.
    result, calls = serve(request(0, 0, 8, 1, (A, 2)), request(1, 50, 8, 2, (A, 2)))
    assert calls[1] == (0, 0, [(4, 4)])
    assert result.requests[1].hit_tokens == 4
    assert result.stored == {A: 2}
    assert [b.used for b in result.log] == [2, 2, 2, 3, 2]  # at 0, 10 and 50; at 60 it writes token 9; at 70 it ends


def test_a_block_computed_in_place_is_private_until_it_is_full() -> None:
    # As above with a budget of 2: kv 4 + 2 holds A's 2 blocks and a partial one, kv 8 only A's.
    result, _ = serve(request(0, 0, 8, 1, (A, 2)), request(1, 100, 8, 1, (A, 2)), budget=2)
    assert [(b.time, b.used) for b in result.log if b.time >= 100] == [(100, 3), (110, 2), (120, 2)]


def test_blocks_are_hit_in_the_plan_that_computes_them() -> None:
    # Both in one plan: the second needs 1 token only, and the two blocks of A count once: 2 + 1 + 1 blocks.
    result, calls = serve(request(0, 0, 9, 1, (A, 2)), request(1, 0, 9, 1, (A, 2)))
    assert calls == [(0, 0, [(9, 0), (1, 8)])]
    assert result.requests[1].hit_tokens == 8
    assert result.log[0].used == 4


def test_what_a_request_keeps_is_hit_by_the_next() -> None:
    # kv at the end is 5 + 5 - 1 = 9: 2 full blocks become S's. The next turn, of 12 tokens, hits both, computes 4, and
    # ends with 12 + 5 - 1 = 16: 4 full blocks, 2 of them beyond the path.
    turns = request(0, 0, 5, 5, (S, 0), keep=True), request(1, 90, 12, 5, (S, 2), keep=True)
    result, calls = serve(*turns)
    assert calls[5] == (0, 0, [(4, 8)])
    assert result.requests[1].hit_tokens == 8
    assert result.stored == {S: 4}
    assert serve(turns[0])[0].stored == {S: 2}


def test_two_that_keep_one_chain_store_its_blocks_once() -> None:
    # Both end at 20 with kv 8; the second finds S's 2 blocks there already.
    result, _ = serve(request(0, 0, 7, 2, (S, 0), keep=True), request(1, 0, 7, 2, (S, 0), keep=True))
    assert result.stored == {S: 2}
    assert [b.used for b in result.log] == [4, 4, 2]


# Eviction.


def test_the_end_of_the_last_chain_of_a_path_goes_first() -> None:
    # Capacity 5; A 2 and B 1 stored, 2 free. Request 1 takes 3: B goes. It leaves 3 free; request 2 takes 4: A's last.
    first = request(0, 0, 13, 1, (A, 2), (B, 1))
    result, _ = serve(first, request(1, 50, 12, 1), capacity=5)
    assert (result.stored, result.evicted_blocks) == ({A: 2}, 1)
    result, _ = serve(first, request(1, 50, 12, 1), request(2, 90, 16, 1), capacity=5)
    assert (result.stored, result.evicted_blocks) == ({A: 1}, 2)


def test_the_chain_used_least_recently_goes_first() -> None:
    # A 2, then B 2, then A again (hit 2): of capacity 5, 1 is free. Request 3 takes 2: B loses its last block.
    requests = [request(0, 0, 9, 1, (A, 2)), request(1, 50, 9, 1, (B, 2)), request(2, 100, 9, 1, (A, 2))]
    result, _ = serve(*requests, request(3, 150, 8, 1), capacity=5)
    assert (result.stored, result.evicted_blocks) == ({A: 2, B: 1}, 1)
    # Without the use in between it is A's.
    result, _ = serve(*requests[:2], request(3, 150, 8, 1), capacity=5)
    assert (result.stored, result.evicted_blocks) == ({A: 1, B: 2}, 1)


def test_chains_in_use_are_not_evicted() -> None:
    # Request 0 runs on A with 3 blocks of 5; B holds 2, loose. Request 1 (8 tokens) takes B's.
    requests = request(0, 0, 8, 1, (B, 2)), request(1, 50, 9, 4, (A, 2)), request(2, 60, 8, 1)
    result, _ = serve(*requests, capacity=5)
    assert times(result, 2) == (70, 70)
    assert (result.stored, result.evicted_blocks) == ({A: 2}, 2)


# Preemption and waiting.


def test_the_last_is_preempted_and_computed_again() -> None:
    # Capacity 4, both hold 2 blocks at 0; first tokens at 10. Then request 0 (kv 7) needs none, request 1 (kv 8) one
    # and goes. Request 0 alone: kv 8 at 10, 9 at 20 (3 blocks); T = 9 of request 1 needs 3, so it waits. s = 6 at
    # 60. Request 1: 9 tokens from 60 to 70 (s = 2), a decode to 80 (s = 3).
    result, calls = serve(request(0, 0, 7, 6), request(1, 0, 8, 3), capacity=4)
    assert calls == [
        (0, 0, [(7, 0), (8, 0)]),
        *[(1, kv, []) for kv in (7, 8, 9, 10, 11)],
        (0, 0, [(9, 0)]),
        (1, 9, []),
    ]
    assert [times(result, i) for i in (0, 1)] == [(10, 60), (10, 80)]
    assert [result.requests[i].preemptions for i in (0, 1)] == [0, 1]
    assert (result.prefill_tokens, result.decode_tokens) == (24, 7)


def test_nobody_is_admitted_in_a_plan_that_preempts() -> None:
    # As above; request 2 (1 token, 1 block) would fit into the 2 blocks that the preemption frees at 10, but comes
    # neither then nor, behind request 1, later: at 60 both are admitted.
    result, calls = serve(request(0, 0, 7, 6), request(1, 0, 8, 3), request(2, 5, 1, 1), capacity=4)
    assert calls[6] == (0, 0, [(9, 0), (1, 0)])
    assert times(result, 2) == (70, 70)


def test_the_preempted_find_their_path_still_stored() -> None:
    # Capacity 6. Request 0: 3 blocks (kv 12 at 0); request 1: A 2 and one private (kv 12). At 10 both need 1: request 1
    # goes; A's 2 stay stored, loose; free is 1, which request 0 takes. At 20, 30, 40 it decodes in its fourth block and
    # T = 13 of request 1 needs 4 - 2 = 2 with 0 free. At 50 kv 16 needs a fifth block: A loses one; s = 6 at 60: end.
    # Then request 1 hits 1 block: 9 tokens of 13.
    result, calls = serve(request(0, 0, 12, 6), request(1, 0, 12, 2, (A, 2)), capacity=6)
    assert calls[6:] == [(0, 0, [(9, 4)])]
    assert result.evicted_blocks == 1
    assert times(result, 1) == (10, 70)
    assert result.requests[1].hit_tokens == 0  # at its first admission
    assert result.stored == {A: 2}


def test_the_prefill_under_way_is_preempted_first() -> None:
    # Capacity 4, budget 5. Request 0 takes 4 tokens, request 1 (9 tokens, 3 blocks) the first 1: 2 blocks used. At 10:
    # decode of kv 4 takes a block, chunk min(8, 4, 1 * 4 + 3) = 4: kv 5, 2 blocks, none free. At 20: kv 5 -> 6, chunk
    # min(4, 4, room 0 * 4 + 3) = 3: kv 8. At 30: kv 7, room 0: a chunk of 0. At 40: kv 8. At 50 request 0 (kv 8) needs
    # a block: request 1 goes. s of request 0: 1 at 10, ..., 6 at 60: end. Then 5 + 4 tokens: first token at 80.
    result, calls = serve(request(0, 0, 4, 6), request(1, 0, 9, 1), capacity=4, budget=5)
    assert calls == [
        (0, 0, [(4, 0), (1, 0)]),
        (1, 4, [(4, 1)]),
        (1, 5, [(3, 5)]),
        (1, 6, []),
        (1, 7, []),
        (1, 8, []),
        (0, 0, [(5, 0)]),
        (0, 0, [(4, 5)]),
    ]
    assert times(result, 1) == (80, 80)
    assert result.requests[1].preemptions == 1


def test_a_head_that_does_not_fit_blocks_those_behind() -> None:
    # Capacity 6: request 0 holds 3 until 50 (kv 12 to 16: a fourth from 10). Request 1 needs 4, request 2 would need 1.
    result, _ = serve(request(0, 0, 12, 5), request(1, 0, 13, 1), request(2, 0, 1, 1), capacity=6)
    assert [times(result, i) for i in range(3)] == [(10, 50), (60, 60), (60, 60)]


def test_blocks_of_its_own_path_do_not_make_room() -> None:
    # Capacity 4: A holds 2, loose, and request 1 (kv 1) 1. Request 2 on A with T = 15 hits 2 and needs 2 of 1 free: its
    # own A is no room. Request 1, planned at 50, ..., 130, writes kv 1, 2, 3, 4, 5 (at 90: the free block), 6, 7, 8, 9
    # (at 130: A's last block); s = 9 at 140. Then request 2 hits 1 block.
    requests = request(0, 0, 8, 1, (A, 2)), request(1, 50, 1, 9), request(2, 55, 15, 1, (A, 2))
    result, _ = serve(*requests, capacity=4)
    assert times(result, 1) == (60, 140)
    assert result.evicted_blocks == 1
    assert result.requests[2].hit_tokens == 4
    assert times(result, 2) == (150, 150)


# Chains that hold more than the path of a request.


def test_a_head_whose_own_chain_fills_the_instance_is_admitted() -> None:
    # S holds (8 + 9 - 1) // 4 = 4 of 5. Request 1 uses 1 of them and needs 2 more with 1 free: S is cut to 1.
    result, calls = serve(request(0, 0, 8, 9, (S, 0), keep=True), request(1, 200, 12, 1, (S, 1)), capacity=5)
    assert calls[-1] == (0, 0, [(8, 4)])
    assert times(result, 1) == (210, 210)
    assert (result.evicted_blocks, result.stored) == (3, {S: 1})


def test_one_that_preempts_itself_is_planned_again_at_once() -> None:
    # S holds 4 of 5. Request 1 uses 1, needs 1 and gets it; first token at 210. Its decode of kv 8 needs another: it is
    # the last itself and goes. At the same instant it comes again, T = 9 needs 2 of 1: S is cut to 1. 5 tokens to 220.
    requests = request(0, 0, 8, 9, (S, 0), keep=True), request(1, 200, 8, 3, (S, 1))
    result, calls = serve(*requests, capacity=5)
    assert calls[9:] == [(0, 0, [(4, 4)]), (0, 0, [(5, 4)]), (1, 9, [])]
    assert times(result, 1) == (210, 230)
    assert result.requests[1].preemptions == 1
    assert result.evicted_blocks == 3


def test_a_lone_prefill_without_room_is_planned_again() -> None:
    # Capacity 6, budget 5, both on S without blocks of it. At 0: 4 tokens of request 0, 1 of the 20 of request 1 (5
    # blocks of 5). Then chunks of 4: kv 5, 9, 13 and request 0 in its second block: full. At 40 room is 3: kv 16. At 50
    # request 0 ends with kv 8: S holds 2, held by request 1 too; no room, no decode. It is planned again: S is cut, and
    # 20 tokens take 4 iterations of 5.
    requests = request(0, 0, 4, 5, (S, 0), keep=True), request(1, 0, 20, 1, (S, 0))
    result, calls = serve(*requests, capacity=6, budget=5)
    assert calls[4:] == [(1, 7, [(3, 13)]), *[(0, 0, [(5, kv)]) for kv in (0, 5, 10, 15)]]
    assert times(result, 0) == (10, 50)
    assert times(result, 1) == (90, 90)
    assert result.requests[1].preemptions == 1
    assert (result.evicted_blocks, result.stored) == (2, {})


# Loads.

LOADED = request(0, 0, 5, 4, (A, 1), keep=True)
"""Alone: s = 1 at 10, 2 at 20, 3 at 30, 4 at 40; it keeps (5 + 4 - 1) // 4 - 1 = 1 block more of A."""


def test_a_load_in_flight_holds_decodes_up() -> None:
    # Called at 15, it lasts from 20 to 120: s = 3 at 130, 4 at 140. What is stored before is not hit after: request 1,
    # planned at 130, computes all 5 tokens and stores A anew; request 0 keeps nothing.
    result, calls = serve(LOADED, request(1, 125, 5, 1, (A, 1)), loads=((15, 1, 100, "in_flight"),))
    assert calls == [(0, 0, [(5, 0)]), (1, 5, []), (1, 6, []), (1, 7, [(5, 0)])]
    assert times(result, 0) == (10, 140)
    assert result.requests[1].hit_tokens == 0
    assert (result.stored, result.evicted_blocks) == ({A: 1}, 0)
    assert (result.iterations, result.busy) == (4, 40)
    # At 130: A's old block, request 0's second (kv 8), A's new one, request 1's partial one.
    assert [b.used for b in result.log if b.time == 130] == [4]


def test_a_drain_waits_for_those_that_run() -> None:
    # Request 1 arrives at 25 and must wait; the load lasts from 40 to 140, and what request 0 kept is gone.
    result, _ = serve(LOADED, request(1, 25, 5, 1, (A, 1)), loads=((15, 1, 100, "drain"),))
    assert times(result, 0) == (10, 40)
    assert times(result, 1) == (150, 150)
    assert result.requests[1].hit_tokens == 0
    assert result.stored == {A: 1}


def test_an_abort_computes_everything_again() -> None:
    # At 20 request 0 (s = 2) goes, from 120 it computes 5 + 2 tokens: s = 3 at 130, 4 at 140; then it keeps.
    result, calls = serve(LOADED, loads=((15, 1, 100, "abort"),))
    assert calls == [(0, 0, [(5, 0)]), (1, 5, []), (0, 0, [(7, 0)]), (1, 7, [])]
    assert times(result, 0) == (10, 140)
    assert result.requests[0].preemptions == 1
    assert (result.prefill_tokens, result.decode_tokens) == (12, 3)
    assert result.stored == {A: 2}


def test_the_aborted_wait_in_their_old_order_in_front() -> None:
    # 0 and 1 run from 0, 2 arrives at 5. Aborted at 10, 0 and 1 wait before it; all are admitted in that order at 60.
    requests = request(0, 0, 2, 9), request(1, 0, 2, 9), request(2, 5, 2, 9)
    result, _ = serve(*requests, loads=((5, 1, 50, "abort"),))
    assert [b.waiting for b in result.log if b.time == 10] == [(0, 1, 2)]
    assert [b.running for b in result.log if b.time == 60] == [(0, 1, 2)]


def test_a_load_called_before_another_happened_replaces_it() -> None:
    # The drain of 15 would wait until 40; replaced at 25 it happens at 30 and lasts until 37: s = 4 at 47.
    result, _ = serve(LOADED, loads=((15, 1, 100, "drain"), (25, 2, 7, "in_flight")))
    assert times(result, 0) == (10, 47)
    assert [b.time for b in result.log if b.loading] == [30]


def test_a_load_of_an_idle_instance_begins_at_once() -> None:
    # A's 2 blocks vanish at 50; request 1 arrives during the load and is planned at 150. The load called at 80 is next.
    requests = request(0, 0, 9, 1, (A, 2)), request(1, 60, 9, 1, (A, 2))
    result, _ = serve(*requests, loads=((50, 1, 100, "in_flight"),))
    assert times(result, 1) == (160, 160)
    assert result.requests[1].hit_tokens == 0
    result, _ = serve(*requests, loads=((50, 1, 100, "in_flight"), (80, 2, 100, "drain")))
    assert times(result, 1) == (260, 260)


def test_a_prefill_under_way_stores_nothing_after_a_load() -> None:
    # Budget 4: kv 4 at 10, the load lasts until 20, kv 8 at 30, kv 9 at 40. Block 0 of A is detached, block 1 private.
    result, calls = serve(request(0, 0, 9, 1, (A, 2)), budget=4, loads=((1, 1, 10, "in_flight"),))
    assert calls == [(0, 0, [(4, 0)]), (0, 0, [(4, 4)]), (0, 0, [(1, 8)])]
    assert times(result, 0) == (40, 40)
    assert result.stored == {}


# Cancels.


def test_a_waiting_request_is_gone_at_once() -> None:
    # Request 1 waits behind max_seqs = 1 and goes at 7; request 2 is next at 40.
    result, _ = serve(LOADED, request(1, 1, 5, 1), request(2, 2, 5, 1), max_seqs=1, cancels=((7, 1),))
    assert times(result, 1) == (None, 7)
    assert times(result, 2) == (50, 50)


def test_a_running_request_ends_at_the_boundary_and_keeps_nothing() -> None:
    # Cancelled at 25, it ends at 30 with 3 tokens. A's block of its path is stored, as at completion.
    result, _ = serve(LOADED, cancels=((25, 0),))
    assert times(result, 0) == (10, 30)
    assert result.requests[0].sampled == 3
    assert result.stored == {A: 1}


def test_a_prefill_that_is_cancelled_leaves_what_it_stored() -> None:
    # Budget 4: of 9 tokens 4 are computed when it ends at 10: one block of A.
    result, _ = serve(request(0, 0, 9, 1, (A, 2)), budget=4, cancels=((5, 0),))
    assert times(result, 0) == (None, 10)
    assert result.stored == {A: 1}


def test_a_cancel_during_a_load_takes_effect_at_its_end() -> None:
    result, _ = serve(LOADED, loads=((15, 1, 100, "in_flight"),), cancels=((50, 0),))
    assert times(result, 0) == (10, 120)
    assert result.requests[0].sampled == 2
    assert result.stored == {}


def test_cancelled_requests_are_released_after_complete_ones() -> None:
    # Request 0 (A) is cancelled, request 1 (B) complete, both at 10: B is released first, A is used more recently. Of
    # capacity 4, 2 are free; request 2 takes 3: B goes.
    requests = request(0, 0, 5, 3, (A, 1)), request(1, 0, 5, 1, (B, 1)), request(2, 50, 12, 1)
    result, _ = serve(*requests, capacity=4, cancels=((5, 0),))
    assert result.stored == {A: 1}


def test_a_cancel_at_the_last_iteration_changes_nothing() -> None:
    # The iteration from 30 to 40 is the last: the request is complete at 40, where the cancel would take effect.
    for time in (35, 40):
        result, _ = serve(LOADED, cancels=((time, 0),))
        assert times(result, 0) == (10, 40)
        assert result.stored == {A: 2}


def test_cancels_that_come_too_late_or_too_early_do_nothing() -> None:
    result, _ = serve(LOADED, request(1, 90, 5, 1), cancels=((60, 0), (60, 1), (60, 2)))
    assert times(result, 0) == (10, 40)
    assert times(result, 1) == (100, 100)


# What is refused.


@pytest.mark.parametrize(
    "bad",
    [
        request(0, 0, 9, 4),  # ceil(13 / 4) = 4 blocks of 3
        request(0, 0, 0, 1),
        request(0, 0, 1, 0),
        request(0, 0, 7, 1, (A, 2)),  # two blocks need 8 tokens
        request(0, 0, 7, 1, (A, 0), (B, 1)),
    ],
)
def test_impossible_requests_are_refused(bad: OracleRequest) -> None:
    with pytest.raises(ValueError, match="request 0"):
        serve(bad, capacity=3)


# Random workloads: the oracle checks its own invariants at every boundary.


@st.composite
def workloads(
    draw: st.DrawFn,
) -> tuple[OracleInstance, list[OracleRequest], list[Load], list[tuple[int, int]]]:
    """A small instance, requests on a random tree of chains, loads and cancels."""
    block = draw(st.integers(1, 5))
    capacity = draw(st.integers(4, 14))
    chains: list[tuple[tuple[int, int], ...]] = []  # the path before each chain
    for _ in range(draw(st.integers(1, 5))):
        before: tuple[tuple[int, int], ...] = ()
        if chains and draw(st.booleans()):
            parent = draw(st.integers(0, len(chains) - 1))
            before = (*chains[parent], (parent, draw(st.integers(1, 2))))
        chains.append(before)

    requests: list[OracleRequest] = []
    now = 0
    for identity in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0, 0, 1, 10, 25, 100]))
        path: tuple[tuple[int, int], ...] = ()
        if draw(st.integers(0, 4)):
            chain = draw(st.integers(0, len(chains) - 1))
            path = (*chains[chain], (chain, draw(st.integers(0, 3))))
        prompt = max(1, sum(blocks for _, blocks in path) * block + draw(st.integers(0, 2 * block)))
        room = capacity * block - prompt
        if room >= 1:
            output = draw(st.integers(1, min(room, 3 * block)))
            requests.append(OracleRequest(identity, now, prompt, output, path, draw(st.booleans())))
    when = st.integers(0, now + 100)
    modes = st.sampled_from(["in_flight", "drain", "abort"])
    loads = draw(st.lists(st.tuples(when, st.just(1), st.integers(0, 60), modes), max_size=3))
    cancels = draw(st.lists(st.tuples(when, st.integers(0, 11)), max_size=3))
    instance = OracleInstance(
        block,
        capacity,
        draw(st.integers(1, 4 * block)),
        draw(st.integers(1, 6)),
        lambda decodes, context, chunks: 5 + decodes + context // 4 + sum(tokens + kv // 4 for tokens, kv in chunks),
    )
    return instance, requests, loads, cancels


@settings(max_examples=100)
@given(workloads())
def test_everything_ends(
    workload: tuple[OracleInstance, list[OracleRequest], list[Load], list[tuple[int, int]]],
) -> None:
    instance, requests, loads, cancels = workload
    result = instance.run(requests, loads, cancels, record=True)
    cancelled = {identity for _, identity in cancels}
    for request in requests:
        report = result.requests[request.id]
        assert report.end is not None
        assert request.id in cancelled or report.sampled == request.output
        assert report.first_token is None or request.arrival < report.first_token <= report.end
    assert sum(result.stored.values()) == result.log[-1].used if result.log else not requests
    assert all(boundary.used <= instance.capacity for boundary in result.log)
    # The same again: a run leaves nothing behind in the instance.
    assert instance.run(requests, loads, cancels, record=True) == result


def test_without_shared_blocks_a_large_instance_computes_every_token_once() -> None:
    # 200 requests, no path, no shortage: prompts in full, and all tokens but the first of each are decoded.
    requests = [OracleRequest(i, 7 * i, 1 + 13 * i % 50, 1 + 7 * i % 30) for i in range(200)]
    result, _ = serve(*requests, capacity=1000, budget=64, max_seqs=16)
    assert result.prefill_tokens == sum(request.prompt for request in requests)
    assert result.decode_tokens == sum(request.output - 1 for request in requests)
    assert result.evicted_blocks == 0
