r"""Prefix-tree merging against four others', run and not copied. Development only: none is a dependency of Forge.

pip install trl==1.16.0 && pip install --no-deps areal==1.0.4 prefix-grouper==0.0.1.post1 tree-recurrence==0.1.1
pip install httpx colorlog tenacity flask torchdata lark uvloop numba aiofiles openai orjson aiohttp hydra-core ray \
    pillow einops  # what areal imports

Where two disagree, one sequence at a time decides: each oracle is compared with the plain path, and we with each.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle_support import (
    Seen,
    Sequences,
    agree,
    areal_pack,
    check,
    flash_attn_varlen_func,
    forward,
    group,
    named,
    ours,
    padded,
    padded_attention,
    seen_on_paths,
    seen_under,
    table_of,
    trl_pack,
)
from torch import Tensor
from tree_support import CORPUS, grown

from forge.forest import Forest

ODD = [[4, 2, 4], [4, 2, 4], [4], [4, 2], [], [5], [4, 2, 4, 4]]  # equal, nested, of one token, empty
FORESTS = dict(CORPUS) | {f"grown {seed}": grown(seed) for seed in range(3)} | {"odd": ODD}
forests = pytest.mark.parametrize("sequences", FORESTS.values(), ids=FORESTS.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])


def oracle(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their imports warn about their own dependencies
        return pytest.importorskip(name, reason="development oracle, not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def areal() -> Any:
    tree = oracle("areal.models.tree_attn.tree")
    gather = oracle("areal.models.tree_attn.functional").gather_packed_tree_logprobs
    return SimpleNamespace(tree=tree, gather=gather, spec=oracle("areal.api.cli_args").MicroBatchSpec)


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    packing = oracle("trl.experimental.async_grpo.packing")
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    packing.register_tree_attention()
    return packing


@pytest.fixture(scope="module")
def grouper() -> Any:
    package = oracle("prefix_grouper")
    oracle("prefix_grouper.utils.register_transformers").register_attention()
    oracle("transformers").AttentionInterface.register("padded", padded_attention)
    return package.PrefixGrouper


@pytest.fixture(scope="module")
def recurrence() -> Any:
    package = oracle("tree_recurrence")
    scan = oracle("tree_recurrence.components").gated_delta_rule_scan
    rule = oracle("tree_recurrence.reference").chunk_gated_delta_rule
    return SimpleNamespace(plan=package.TreePlan, policy=package.Policy, scan=package.tree_scan, rule=rule, of=scan)


# --- AReaL ------


@forests
def test_areal_packs_the_same_tokens_under_the_same_mask(areal: Any, sequences: Sequences) -> None:
    packed, trie, mask, size = areal_pack(areal, sequences)
    spans = [trie.get_sequence_tree_indices(i) for i in range(len(sequences))]
    names = named(sequences, [[t for a, b in through for t in range(a, b + 1)] for through in spans])
    check(names, seen_under(mask), packed["position_ids"][0].tolist(), packed["input_ids"][0].tolist())
    assert size == len(names)
    assert set(names.values()) == ours(sequences)


@dtypes
@forests
def test_areal_gives_the_same_logprobs_and_gradients(areal: Any, sequences: Sequences, dtype: torch.dtype) -> None:
    packed, trie, mask, size = areal_pack(areal, sequences)
    ids, places = packed["input_ids"][:, :size], packed["position_ids"][:, :size]

    def theirs(net: Any) -> list[Tensor]:
        logits = net(input_ids=ids, position_ids=places, attention_mask=mask[None, None], use_cache=False).logits[0]
        with torch.compiler.set_stance("force_eager"):  # its gather is compiled, which takes longer than all else here
            flat = areal.gather(logits, trie, ids)
        there = trie.all_sequence_ids  # the empty ones are gone
        parts = dict(zip(there, flat.split([len(sequences[i]) for i in there]), strict=True))
        for i, part in parts.items():
            # Its docstring promises n - 1 a sequence, as the plain path has them. It gives n: the last is of packed
            # token 0 after the whole sequence, a label that no sequence has, and left to the caller's mask.
            last = trie.get_sequence_tree_indices(i)[-1][1]
            assert torch.allclose(part[-1], table_of(logits)[last, ids[0, 0]])
        return [parts[i][:-1] if i in parts else torch.zeros(0) for i in range(len(sequences))]

    agree(theirs, sequences, dtype)


def test_areal_fails_where_forests_do_not(areal: Any) -> None:
    nested = [list(range(n)) for n in range(1, 1101)]  # it takes a Python frame a node of depth
    ids, mask = padded(nested)
    with pytest.raises(RecursionError):
        areal.tree._greedy_build_tries({"input_ids": ids, "attention_mask": mask}, 2048)
    assert len(Forest.of(nested)) == 1100
    # Padded on the left, its trie is right and the tokens packed by it are not: they are read from column 0 on.
    data = {"input_ids": torch.tensor([[0, 7, 8], [7, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    batch = areal.tree.build_packed_tree_batch(data, areal.spec(max_tokens_per_mb=128))
    assert batch.mbs[0]["input_ids"][0, :3].tolist() == [0, 7, 9]
    assert Forest.of([[7, 8], [7, 8, 9]]).tokens.tolist() == [7, 8, 9]


# --- TRL ------


@forests
def test_trl_sees_the_same_and_forwards_one_token_more_a_branch(trl: Any, sequences: Sequences) -> None:
    packed = trl_pack(trl, sequences)
    tokens = packed["input_ids"].tolist()
    seen = seen_on_paths(packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"], packed["tree_kv_index"])
    names = {place: tuple(tokens[key] for key in path) for place, path in seen.items()}
    check(names, seen, packed["position_ids"].tolist(), tokens)
    cut = [sequence[:-1] for sequence in sequences]  # it lists a place for all tokens but the last
    through = packed["token_index"].split([len(one) for one in cut])
    assert named(cut, through).items() <= names.items()
    assert set(names.values()) == ours(sequences)
    # It keys a token by the next one too, for one label a place; we keep one place and gather several labels from it.
    forest = Forest.of(sequences)
    ways = np.bincount(forest.parent[forest.parent >= 0], minlength=len(forest))
    ways[np.unique([forest.nodes_of(i)[-1] for i, one in enumerate(sequences) if one])] += 1  # to end is a way on
    assert len(tokens) == len(forest) + int((ways - 1).sum())


@dtypes
@forests
def test_trl_gives_the_same_logprobs_and_gradients(trl: Any, sequences: Sequences, dtype: torch.dtype) -> None:
    packed = trl_pack(trl, sequences)
    tree: dict[str, Any] = {key: packed[key] for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    tree["tree_max_seqlen_q"], tree["tree_max_seqlen_k"] = packed["tree_max_seqlens"].tolist()

    def theirs(net: Any) -> list[Tensor]:
        ids, places, at = packed["input_ids"], packed["position_ids"], packed["token_index"]
        table = table_of(forward(net, trl.TREE_ATTENTION, ids[None], places[None], **tree)[0])
        flat = table[at, packed["shift_labels"][at]]
        return list(flat.split([max(0, len(one) - 1) for one in sequences]))

    agree(theirs, sequences, dtype)


# --- PrefixGrouper ------


@dtypes
@forests
def test_prefix_grouper_agrees_and_merges_one_branching(grouper: Any, sequences: Sequences, dtype: torch.dtype) -> None:
    sequences = [one for one in sequences if len(one) > 1]  # it needs a prefix and a suffix of each
    made, ids, places, rows = group(grouper, sequences)
    names = named(sequences, places)
    depths = torch.zeros(ids.numel(), dtype=torch.int64)
    for through in places:
        depths[through] = torch.arange(len(through))
    numbers = torch.arange(1.0, ids.numel() + 1).view(len(ids), 1, -1, 1)
    seen: Seen = {}

    def spy(q: Tensor, k: Tensor, _v: Tensor, mask: Tensor) -> Tensor:
        for queries, keys, real in zip(q[:, 0, :, 0].tolist(), k[:, 0, :, 0], mask, strict=True):
            for n, query in enumerate(queries, start=1 + k.shape[2] - q.shape[2]):
                if query:  # padding is zero
                    seen[int(query) - 1] = [int(key) - 1 for key in keys[:n][real[:n]]]
        return q.transpose(1, 2)

    made.forward(spy, numbers, numbers, numbers)
    check(names, seen, depths.tolist(), ids.flatten().tolist())
    assert set(names.values()) == ours(sequences)
    assert len(names) >= len(Forest.of(sequences))  # what only some of a group share is repeated

    def theirs(net: Any) -> list[Tensor]:
        how = {"prefix_grouper": made, "prefix_grouper_attn_func": "padded"}
        logits = forward(net, "prefix_grouper_attention", ids, depths.view_as(ids), **how)
        before, real, after, _ = made.split_output(logits, include_prefix_last=1)
        out, tails = [torch.zeros(0)] * len(sequences), iter(table_of(after))
        for (cut, of), row, on in zip(rows, before, real, strict=True):
            head = table_of(row[on])[range(cut - 1), sequences[of[0]][1:cut]]
            for i in of:
                tail = sequences[i][cut:]
                out[i] = torch.cat([head, next(tails)[range(len(tail)), tail]])
        return out

    agree(theirs, sequences, dtype)


# --- tree-recurrence ------


@forests
def test_recurrences_could_follow_our_segments(recurrence: Any, sequences: Sequences) -> None:
    """No recurrent layer is served today; should one be, our segments are all that this package asks for."""
    forest = Forest.of(sequences)
    runs = forest.segments
    parents = np.searchsorted(runs.start, forest.parent[runs.start], side="right") - 1
    cu = np.append(runs.start, len(forest))
    plan = recurrence.plan.from_kwargs({"tree_cu_seqlens_q": cu, "tree_segment_parents": parents})
    nodes = [torch.tensor(forest.nodes_of(i)) for i in range(len(sequences)) if sequences[i]]
    seen = seen_on_paths(plan.cu_seqlens, plan.cu_seqlens_k, plan.kv_index)
    names = named([one for one in sequences if one], nodes)
    check(names, seen, forest.depth.tolist(), forest.tokens.tolist())

    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 4), (2, 4), (2, 4), (2,), (2,)]  # q, k, v, decay, beta
    given = [torch.randn(1, len(forest), *s, generator=draw, dtype=torch.float64) for s in shapes]
    inputs = [x.requires_grad_() for x in (*given[:3], -given[3].abs(), given[4].sigmoid())]
    alone = [recurrence.rule(*(x[:, at] for x in inputs), use_qk_l2norm_in_kernel=True)[0] for at in nodes]
    weights = [torch.randn(one.shape, generator=draw, dtype=torch.float64) for one in alone]
    loss = sum((one * w).sum() for one, w in zip(alone, weights, strict=True))
    want = torch.autograd.grad(loss, inputs)
    for saved in (0, 10**9):  # fork the state at branches; scan every path
        policy = recurrence.policy(fork_min_saved_tokens=saved)
        out = recurrence.scan(recurrence.of(recurrence.rule), inputs, plan, policy=policy)
        for one, at in zip(alone, nodes, strict=True):
            torch.testing.assert_close(out[:, at], one, rtol=0, atol=1e-12)
        got = torch.autograd.grad(sum((out[:, at] * w).sum() for at, w in zip(nodes, weights, strict=True)), inputs)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
