"""Faults of what an import says beside versions that were not tested."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a nightly Keras is refused",
        file="keras_lso/_keras_internals/keras_version.py",
        old="contains(version, prereleases=True)",
        new="contains(version, prereleases=False)",
        tests="tests/test_keras_version.py::test_versions",
    ),
    Fault(
        name="a newer Keras is taken without a look",
        file="keras_lso/_keras_internals/keras_version.py",
        old='    if is_newer_than_tested("keras", version):\n',
        new='    if is_newer_than_tested("keras", "3.15"):\n',
        tests="tests/test_keras_version.py::test_all_that_is_missing_is_named_at_once",
    ),
    Fault(
        name="a newer framework is taken without a look",
        file="keras_lso/_keras_internals/keras_version.py",
        old="    if name in TESTED and version and is_newer",
        new="    if name in TESTED and not version and is_newer",
        tests="tests/test_keras_version.py::test_a_newer_framework_without_a_private_function_is_refused",
    ),
    Fault(
        name="a probe asks the class alone, not what its methods set",
        file="keras_lso/_keras_internals/private_names/probes.py",
        old="    return hasattr(owner, name) or any(",
        new="    return hasattr(owner, name) and any(",
        tests="tests/_keras_internals/private_names/test_probes.py::test_what_methods_set_is_found_in_their_code",
    ),
    Fault(
        name="a method may take anything",
        file="keras_lso/_keras_internals/private_names/probes.py",
        old='bind("self", *arguments)',
        new='bind_partial("self")',
        tests="tests/_keras_internals/private_names/test_probes.py::test_a_method_has_to_take_what_is_passed",
    ),
    Fault(
        name="Nadam's product is not listed",
        file="keras_lso/_keras_internals/private_names/of_keras.py",
        old='_velocities _u_product")',
        new='_velocities")',
        tests="tests/_keras_internals/private_names/test_lists.py::test_every_private_attribute_that_is_used_is_listed",
    ),
    Fault(
        name="PyTorch's fused Adam is not listed",
        file="keras_lso/_keras_internals/private_names/of_frameworks.py",
        old='    _torch("torch", "_fused_adam_"),\n',
        new="",
        tests="tests/_keras_internals/private_names/test_lists.py::test_every_private_attribute_that_is_used_is_listed",
    ),
]
