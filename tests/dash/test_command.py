"""`forge dashboard`: what is missing is one sentence with the way out."""

from __future__ import annotations

import importlib.util
import socket
import sys
from importlib.machinery import ModuleSpec

import pytest

from forge.cli import main


def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    monkeypatch.setattr(sys, "argv", ["forge", "dashboard", *args])
    assert main() == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def test_a_busy_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("streamlit", reason="pip install 'forge-rl[dash]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = complaint(monkeypatch, capsys, "--port", str(port))
    assert told == f"error: --port {port}: cannot be had on 127.0.0.1: Address already in use; give another --port\n"


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec

    def without_streamlit(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "streamlit" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_streamlit)
    told = complaint(monkeypatch, capsys)
    assert told == "error: the dashboard needs streamlit: pip install 'forge-rl[dash]'\n"
