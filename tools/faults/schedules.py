"""Faults of schedules."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a large step is rounded before the offset is taken off",
        file="keras_lso/schedules/_steps.py",
        old="return steps._replace(whole=whole - start",
        new="start = float(start)\n    return steps._replace(whole=ops.cast(ops.cast(whole, 'float32') - start, 'int32')",
        tests="tests/schedules/test_rates.py::test_a_large_step_is_subtracted_before_it_is_rounded",
    ),
    Fault(
        name="the config of a schedule loses an argument",
        file="keras_lso/schedules/warmup.py",
        old='"power": self.power,',
        new="",
        tests="tests/schedules/test_configs.py::test_a_copy_is_the_same_schedule",
    ),
    Fault(
        name="an offset is added",
        file="keras_lso/schedules/polynomial.py",
        old="elapsed(step, self",
        new="elapsed(step, -self",
        tests="tests/schedules/test_rates.py::test_rates_are_what_the_formula_says",
    ),
    Fault(
        name="a schedule in a sequence sees the steps of all",
        file="keras_lso/schedules/joined.py",
        old="schedule, step - start",
        new="schedule, step",
        tests="tests/schedules/test_rates.py::test_a_sequential_member_sees_the_steps_since_its_boundary",
    ),
    Fault(
        name="the Transformer's policy counts from zero",
        file="keras_lso/compat/open_seq2seq/schedules.py",
        old="(_whole(step), -1)",
        new="(_whole(step))",
        tests="tests/compat/open_seq2seq/test_schedules.py::test_rates_are_what_the_formula_says",
    ),
    Fault(
        name="a rate is scaled by the root of the batch size",
        file="keras_lso/schedules/recipes.py",
        old="return base_learning_rate * batch_size / base_batch_size",
        new="return base_learning_rate * (batch_size / base_batch_size) ** 0.5",
        tests="tests/schedules/test_recipes.py::test_linear_scaling_is_proportional_to_the_batch_size",
    ),
]
