"""What a run's trace says in numbers: the content of `summary.json`, the same keys in both worlds.

`fold.py` gathers records from events, `laws.py` checks the queue's laws without using the queue, `stats.py` holds the
estimators, `intervals.py` bounds means and differences, `summary.py` puts the figures together.
"""

from forge.metrics.fold import ItemRecord, RunFold, StepRecord, fold
from forge.metrics.laws import LawCheck
from forge.metrics.summary import SCHEMA, figures, summarise

__all__ = ["SCHEMA", "ItemRecord", "LawCheck", "RunFold", "StepRecord", "figures", "fold", "summarise"]
