"""The processes of the ranks, seen from the one that trains: started together, asked together, ended together.

A rank that dies takes the others down with it, for they would wait for it in a collective operation for ever. Nothing
outlives the process that holds `Ranks`: torchrun dies with it, and the ranks with torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forge.train.zero.launch import ENDED
from forge.train.zero.messages import Failed
from forge.types import ForgeError

#: What a pipe raises once the other side is gone.
GONE = (EOFError, OSError)
FOLDER = "forge-ranks-"
SOCKET = "socket"
LOG = "ranks.log"
RESUME = "no committed step is lost: go on with `forge run --resume RUN`"
#: seconds: torch, transformers and DeepSpeed are imported by each rank
START_S = 300.0
#: seconds that torchrun gets to notice a death, end the survivors and write down who it was
VERDICT_S = 10.0
#: seconds that ranks get to leave by themselves
LEAVE_S = 2.0
#: one thread each: contending pools are ten times slower. Gloo and NCCL use the loopback interface alone, and torchrun
#: opens no store of its own.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    **({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}


class RankDiedError(ForgeError):
    """A rank ended while it was needed. No step is half done: what is committed stays, the rest is asked for again."""


class RankError(RuntimeError):
    """A rank failed by a fault of ours; the message is its traceback."""


class Ranks:
    """`count` processes of `forge.train.zero.rank`. Their output goes to `log`, or nowhere that lasts.

    `doing` is what an error says they were at; set it before asking.
    """

    def __init__(self, count: int, log: Path | None = None) -> None:
        self.count = count
        self.doing = "while starting"
        clear_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))  # readable by this user alone
        self.log = log or self.folder / LOG
        self.pipes: list[Connection] = []
        self.pids: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
                server.bind(str(self.folder / SOCKET))
                server.listen(count)
                self._torchrun = self._launch()
                self._accept(server)
        except BaseException:
            self.close()
            raise

    def ask(self, messages: Sequence[Any]) -> list[Any]:
        """Send each rank its message; their answers, by rank.

        Raises RankDiedError, RankError, or the ForgeError that the ranks ran into; then all are gone.
        """
        try:
            for pipe, message in zip(self.pipes, messages, strict=True):
                pipe.send(message)
            answers = self._answers()
        except GONE:
            raise self._verdict() from None
        for answer in answers:
            if isinstance(answer, Failed):
                raise self._verdict(answer)
        return answers

    @property
    def torchrun(self) -> int:
        """Its process id."""
        return self._torchrun.pid

    def close(self) -> None:
        """End all of them; whatever they were at is lost. Returns when none is left."""
        for pipe in self.pipes:
            pipe.close()  # a rank that waits for its next message leaves
        self.pipes = []
        if process := getattr(self, "_torchrun", None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
            process.kill()  # and with it the ranks: they belong to it
            process.wait()
            self._wait_for_ranks()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = {**ENVIRONMENT, **os.environ}
        command = [sys.executable, "-m", "forge.train.zero.launch", str(os.getpid()), str(self.folder), str(self.count)]
        with self.log.open("ab") as out:
            # A session of its own: Ctrl-C is for the run, which ends its trainer in order.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def _accept(self, server: socket.socket) -> None:
        server.settimeout(0.2)
        known: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + START_S
        while len(known) < self.count:
            try:
                theirs, _ = server.accept()
            except TimeoutError:
                if self._torchrun.poll() is not None or time.monotonic() > deadline:
                    raise self._verdict() from None
                continue
            theirs.setblocking(True)
            pipe = Connection(theirs.detach())
            self.pipes.append(pipe)
            try:
                rank, pid = pipe.recv()
            except GONE:
                raise self._verdict() from None
            known[rank] = pipe, pid
        self.pipes = [known[rank][0] for rank in range(self.count)]
        self.pids = [known[rank][1] for rank in range(self.count)]

    def _answers(self) -> list[Any]:
        """One from each rank; as soon as one failed, what there is."""
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(waiting):
                assert isinstance(pipe, Connection)
                answer = pipe.recv()
                answers[self.pipes.index(pipe)] = answer
                if isinstance(answer, Failed):
                    return [answer]
        return [answers[rank] for rank in range(self.count)]

    def _verdict(self, failure: Failed | None = None) -> Exception:
        """What is to be raised now that a rank failed; ends all the others first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(VERDICT_S)
        record = self.folder / ENDED
        codes: dict[str, int] = json.loads(record.read_text()) if record.is_file() else {}
        tail = self.log.read_text(errors="replace")[-4000:] if self.log.is_file() else ""
        self.close()
        # The survivors of a killed rank fail too, or are ended by torchrun with SIGTERM: the kill came first.
        killed = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
        if killed:
            rank, number = next(iter(killed.items()))
            how = f"was killed ({signal.Signals(number).name})"
            return RankDiedError(f"DeepSpeed rank {rank} {how} {self.doing}; {RESUME}")
        if failure is not None:
            return ForgeError(failure.text) if failure.is_user_error else RankError(failure.text)
        if codes:
            return RankError(f"DeepSpeed rank {next(iter(codes))} ended {self.doing}; the end of {self.log}:\n{tail}")
        return RankDiedError(f"the DeepSpeed ranks are gone {self.doing}; {RESUME}")

    def _wait_for_ranks(self) -> None:
        """They are no children of ours; the kernel kills them once torchrun is dead, which takes a moment."""
        deadline = time.monotonic() + LEAVE_S
        while any(Path(f"/proc/{pid}").exists() for pid in self.pids) and time.monotonic() < deadline:
            time.sleep(0.01)


def clear_abandoned() -> None:
    """Remove the folders of trainers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            pass  # not ours
