"""`forge serve --record`: an outside agent, its report, and what is kept when the service is stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge.pool.reader import PoolReader
from forge.types import ItemState

ASKED = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "3 + 4"}]}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_outside_agent_is_recorded(tmp_path: Path, stop: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "forge", "serve", "quickstart", "--port", str(port), "--record", str(tmp_path)]
    options = ["--calls", "2", "--log", str(tmp_path / "log.jsonl")]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert any("Ctrl-C" in line for line in service.stdout)

        def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return httpx.post(f"http://127.0.0.1:{port}/t/{path}", json=body, timeout=30)

        told = [post("a/v1/chat/completions", ASKED).status_code for _ in range(3)]
        assert told == [200, 200, 400]
        assert post("b/v1/chat/completions", ASKED).status_code == 200
        assert post("a/report", {"reward": 0.75, "ended": True}).status_code == 200
        service.send_signal(stop)
        assert service.wait(30) == 0
    with PoolReader(tmp_path / "pool.sqlite") as pool:
        assert [pool.item(p).state for p in (0, 1)] == [ItemState.FINISHED, ItemState.DEAD]
        (kept,) = pool.trajectories(0)
    assert (kept.id, kept.outcome.reward, len(kept.completions)) == ("a", 0.75, 2)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 5
