"""Benchmarks: `forge bench NAME` measures now, both sides of every ratio in one run, on this machine."""
