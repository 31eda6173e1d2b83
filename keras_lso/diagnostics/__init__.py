"""Reports on overflow and underflow in float16, a recommendation, and skipped steps."""

from keras_lso.diagnostics.float16 import Float16Report, LayerRange, Magnitudes
from keras_lso.diagnostics.recommendation import Recommendation
from keras_lso.diagnostics.underflow import GradientCounts, UnderflowReport

__all__ = [
    "Float16Report",
    "GradientCounts",
    "LayerRange",
    "Magnitudes",
    "Recommendation",
    "UnderflowReport",
]
