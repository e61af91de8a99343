"""What `test_tree_oracles.py` compares by, and attention in plain torch where an oracle brings only a GPU kernel.

Every packing orders and splits its tokens its own way, so a place is known by what it stands for: a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tree_support import losses, model

from forge.forest import Forest
from forge.train.tree import TreeModel
from forge.train.verify import TOLERANCE, KeepFloat64, Result, Verdict, compare, evaluate, plain_logprobs

Prefix = tuple[int, ...]
Sequences = list[list[int]]
Seen = dict[int, list[int]]  # place to the places it sees


def named(sequences: Sequences, places: Iterable[Iterable[int]]) -> dict[int, Prefix]:
    """The prefix that each place stands for, by the sequences that go through it: one, or it is a false merge."""
    names: dict[int, Prefix] = {}
    for sequence, through in zip(sequences, places, strict=True):
        for n, place in zip(range(1, len(sequence) + 1), through, strict=True):
            assert names.setdefault(int(place), tuple(sequence[:n])) == tuple(sequence[:n])
    return names


def check(names: dict[int, Prefix], seen: Seen, positions: Sequence[int], tokens: Sequence[int]) -> None:
    """Every place sees each of its prefixes once and nothing else, stands at its depth and holds its token."""
    for place, prefix in names.items():
        want = [prefix[:n] for n in range(1, len(prefix) + 1)]
        assert sorted((names[key] for key in seen[place]), key=len) == want
        assert (int(positions[place]), int(tokens[place])) == (len(prefix) - 1, prefix[-1])


def ours(sequences: Sequences) -> set[Prefix]:
    """The prefixes of our forest, itself checked."""
    forest = Forest.of(sequences)
    names = named(sequences, map(forest.nodes_of, range(len(sequences))))
    check(names, seen_under(forest.dense_mask()), forest.depth.tolist(), forest.tokens.tolist())
    assert len(names) == len(forest) == len(set(names.values()))
    return set(names.values())


def seen_under(mask: Any) -> Seen:
    return {q: np.flatnonzero(row).tolist() for q, row in enumerate(np.asarray(mask))}


def seen_on_paths(cu_q: Any, cu_k: Any, kv: Any) -> Seen:
    """The same where segments list their paths and stand at their ends, as TRL's and tree-recurrence's do."""
    paths = [kv[a:b].tolist() for a, b in pairwise(cu_k.tolist())]
    spans = zip(pairwise(cu_q.tolist()), paths, strict=True)
    return {q: path[: len(path) - (end - 1 - q)] for (start, end), path in spans for q in range(start, end)}


def verdicts(
    theirs: Callable[[Any], list[Tensor]], sequences: Sequences, dtype: torch.dtype
) -> tuple[Verdict, Verdict]:
    """Ours and theirs against the plain path in float64: loss, logprobs and every gradient.

    In float32 both may err as the plain path does, twice and eight times: on batches of a few short sequences it errs
    more than 1e-5 itself, since gradients that nearly cancel are measured against a small norm.
    """

    def run(way: Callable[[Any], list[Tensor]], dtype: torch.dtype = dtype) -> Result:
        net = model("llama-mqa", dtype)
        with KeepFloat64() if dtype == torch.float64 else nullcontext():
            return evaluate(way(net), losses(0)["cispo"], net)

    exact = run(lambda net: plain_logprobs(net, sequences), torch.float64)
    plain = run(lambda net: plain_logprobs(net, sequences))
    merged, other = run(lambda net: TreeModel(net).logprobs(sequences)), run(theirs)
    own = compare(plain, exact, 0.0)
    limits = [max(TOLERANCE[dtype], factor * max(own.loss, own.gradient)) for factor in (2, 8)]
    return compare(merged, exact, limits[0]), compare(other, exact, limits[1])


def agree(theirs: Callable[[Any], list[Tensor]], sequences: Sequences, dtype: torch.dtype) -> None:
    for verdict in verdicts(theirs, sequences, dtype):
        assert verdict.exact, verdict
        assert verdict.logprobs < 10 * verdict.limit, verdict


def padded(rows: Sequences) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64)
    return ids, torch.tensor([[n < len(row) for n in range(width)] for row in rows])


def table_of(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def forward(net: Any, attention: str, ids: Tensor, places: Tensor, **more: Any) -> Tensor:
    """Logits under an attention registered with transformers."""
    before = net.config._attn_implementation
    net.set_attn_implementation(attention)
    try:
        logits: Tensor = net(input_ids=ids, position_ids=places, use_cache=False, **more).logits
    finally:
        net.set_attn_implementation(before)
    return logits


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, _q: int, _k: int, *, softmax_scale: float, **_: Any
) -> Tensor:
    """The kernel's contract: each segment's queries stand at the end of its keys."""
    out = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        own, keys, values = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        one = scaled_dot_product_attention(own, keys, values, mask, scale=softmax_scale, enable_gqa=True)
        out.append(one[0].transpose(0, 1))
    return torch.cat(out)


def padded_attention(
    _module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """The same for padded rows: causal from the right end, padding unseen by all but itself (no row may be empty)."""
    late = k.shape[2] - q.shape[2]
    own = torch.eye(k.shape[2], dtype=torch.bool)[late:]
    seen = (mask[:, None, None, :] & torch.ones_like(own).tril(late)) | own
    out = scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


# --- how each is given its sequences ------


def areal_pack(areal: Any, sequences: Sequences) -> tuple[Any, Any, Tensor, int]:
    ids, mask = padded(sequences)
    spec = areal.spec(max_tokens_per_mb=512)
    batch = areal.tree.build_packed_tree_batch({"input_ids": ids, "attention_mask": mask}, spec)
    (packed,), (size,) = batch.mbs, batch.group_lens
    seen = areal.tree.build_attention_mask_from_trie(packed["trie_node"], 512, torch.device("cpu"))
    return packed, packed["trie_node"], seen[:size, :size], size


def trl_pack(trl: Any, sequences: Sequences) -> dict[str, Tensor]:
    row = trl.TreeRow()
    for ids in (torch.tensor(one) for one in sequences if one):  # it raises for an empty one
        flat = {"completion_mask": torch.ones(len(ids)), "old_log_probs": torch.zeros(len(ids))}
        row.add({"input_ids": ids, "advantage": 0.0, "group_id": 0, **flat})
    packed: dict[str, Tensor] = row.pack()
    return packed


def group(grouper: Any, sequences: Sequences) -> tuple[Any, Tensor, list[list[int]], list[tuple[int, list[int]]]]:
    """A row a root: the longest prefix common to all below it, then their suffixes of at least one token. Returns ids,
    places by sequence and, by row, prefix length and sequences: the package leaves finding groups to its user."""
    roots: dict[int, list[int]] = {}
    for i, one in enumerate(sequences):
        roots.setdefault(one[0], []).append(i)
    rows = []
    for of in roots.values():
        columns = enumerate(zip(*(sequences[i][:-1] for i in of), strict=False))
        cut = next((n for n, tokens in columns if len(set(tokens)) > 1), min(len(sequences[i]) for i in of) - 1)
        rows.append((cut, of))
    prefixes, prefix_mask = padded([sequences[of[0]][:cut] for cut, of in rows])
    suffixes, suffix_mask = padded([sequences[i][cut:] for cut, of in rows for i in of])
    made = grouper.from_ungrouped_masks(prefix_mask, suffix_mask, [len(of) for _, of in rows])
    ids = made.concat_input(prefixes, prefix_mask, suffixes, suffix_mask)
    places: list[list[int]] = [[] for _ in sequences]
    for row, (cut, of) in enumerate(rows):
        at = row * ids.shape[1]
        free = at + cut
        for i in of:
            places[i] = [*range(at, at + cut), *range(free, free := free + len(sequences[i]) - cut)]
    return made, ids, places, rows
