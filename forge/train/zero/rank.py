"""One rank, a process that torchrun started: python -m forge.train.zero.rank FOLDER.

It connects to the socket in FOLDER, says (rank, pid), and answers messages until the other side hangs up.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from forge.processes import belong_to
from forge.train.zero.launch import PARENT
from forge.train.zero.messages import Failed, Save, Work
from forge.train.zero.ranks import GONE, SOCKET
from forge.types import ForgeError


def main() -> None:
    belong_to(int(os.environ[PARENT]))
    folder = Path(sys.argv[1])
    code = 0
    with Client(str(folder / SOCKET), "AF_UNIX") as pipe:
        pipe.send((int(os.environ["RANK"]), os.getpid()))
        try:
            serve(pipe, folder)
        except Exception as error:
            code = 1
            is_user_error = isinstance(error, ForgeError)
            text = str(error) if is_user_error else traceback.format_exc()
            with contextlib.suppress(*GONE):
                pipe.send(Failed(text=text, is_user_error=is_user_error))
    # Not sys.exit: leaving the process group in order would wait for ranks that may have died.
    os._exit(code)


def serve(pipe: Connection, folder: Path) -> None:
    inbox = messages(pipe)
    setup = next(inbox, None)
    if setup is None:
        return
    from forge.train.zero.stepping import Stepper  # torch and DeepSpeed: seconds

    stepper = Stepper(setup, folder)
    pipe.send("ready")
    for message in inbox:
        match message:
            case Work():
                pipe.send(stepper.step(message))
            case Save(folder=target):
                stepper.zero.save(target)
                pipe.send("saved")


def messages(pipe: Connection) -> Iterator[Any]:
    """Until the trainer has gone."""
    with contextlib.suppress(*GONE):
        while True:
            yield pipe.recv()


if __name__ == "__main__":
    main()
