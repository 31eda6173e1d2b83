"""Reports on overflow and underflow in float16, a recommendation, and skipped steps."""

from keras_lso.diagnostics.float16 import Float16Report
from keras_lso.diagnostics.float16_ranges import LayerRange
from keras_lso.diagnostics.magnitudes import Magnitudes
from keras_lso.diagnostics.recommendation import Recommendation
from keras_lso.diagnostics.underflow import UnderflowReport
from keras_lso.diagnostics.underflow_counts import GradientCounts

__all__ = [
    "Float16Report",
    "GradientCounts",
    "LayerRange",
    "Magnitudes",
    "Recommendation",
    "UnderflowReport",
]
