"""Forge: an open testbed for reinforcement learning of LLM agents. Start reading at forge/control.py."""

__version__ = "0.1.0"

from forge.compiled import use

use()
