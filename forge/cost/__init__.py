"""Seconds of engine iterations: one cost model for the live router and the simulator. Pure: numpy only.

    on = Deployment(model=model_card("qwen3_32b"), hardware=hardware("h200_sxm"), tp=2)
    cost = CostModel(on)
    cost.iteration(rows=16, context=40_000, prefill=[(512, 1024)])
    cost.decode(rows=16, context=40_000, iterations=100)  # closed form, equal to 100 iterations

`cards` are the descriptions in TOML, `operators` the roofline, `model` the cost model.
"""

from forge.cost.calibration import Calibrated, load_calibration
from forge.cost.cards import Hardware, ModelCard, hardware, model_card
from forge.cost.model import CostModel
from forge.cost.operators import Deployment, Efficiencies, Precision, Work, seconds, work

__all__ = [
    "Calibrated",
    "CostModel",
    "Deployment",
    "Efficiencies",
    "Hardware",
    "ModelCard",
    "Precision",
    "Work",
    "hardware",
    "load_calibration",
    "model_card",
    "seconds",
    "work",
]
