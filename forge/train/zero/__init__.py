"""The train engine over several processes: DeepSpeed's ZeRO stages 1, 2 and 3 on prefix-merged batches.

`engine.py` is what a trainer holds: it plans, and asks `ranks.py`, which starts torchrun (`launch.py`) and talks to the
ranks (`rank.py`). A rank forwards its share of the batch (`portions.py`) in step with all others (`passes.py`) through
DeepSpeed (`deepspeed.py`).
"""
