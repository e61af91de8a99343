"""torchrun as a child process that dies with its parent and says how its ranks ended.

    python -m forge.train.zero.launch PARENT_PID FOLDER RANKS

The ranks meet through a file in FOLDER, so no port is opened for that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from forge.processes import belong_to

#: environment: the process whose death a rank must not outlive
PARENT = "FORGE_TORCHRUN"
#: in the folder: exit code by rank of those that failed, negative for a signal
ENDED = "ended.json"


def main() -> None:
    parent, folder, ranks = sys.argv[1:]
    belong_to(int(parent))
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed import run  # seconds: not before belong_to
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = [
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",  # the run resumes from its checkpoint, not the ranks from nowhere
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={folder}/rendezvous",
        "--rdzv-conf=store_type=file",
        "--local-addr=127.0.0.1",
        "--shutdown-timeout=2",  # survivors hang in a collective that the dead rank will never join
        "--module",
        "forge.train.zero.rank",
        folder,
    ]
    try:
        run.main(arguments)
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        partial = Path(folder, ENDED + ".partial")
        partial.write_text(json.dumps(codes))
        partial.rename(Path(folder, ENDED))
        sys.exit(1)


if __name__ == "__main__":
    main()
