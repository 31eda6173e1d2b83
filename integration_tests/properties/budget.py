"""How many cases a property is tried on: a slice in `make test`, all of them at night.

`HYPOTHESIS_PROFILE=nightly` chooses the night, in which the cases are new ones each
time. What is printed at the end of a failure there (`@reproduce_failure`) brings the
case back by day.
"""

import collections
import functools

import hypothesis
import keras

BACKEND = keras.backend.backend()

# How often each test was run, for the summary that `conftest.py` prints.
counts: collections.Counter = collections.Counter()


def is_nightly():
    return hypothesis.settings.default is hypothesis.settings.get_profile("nightly")


def cases(nightly, **by_day):
    """Decorates what `hypothesis.given` is to run: says how often, and counts.

    Args:
        nightly: Int. How many cases there are at night.
        **by_day: Int for each backend: how many there are in `make test`.
    """
    examples = nightly if is_nightly() else by_day[BACKEND]
    settings = hypothesis.settings(
        max_examples=examples,
        # Cases are large, and some of what is drawn is thrown away.
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def decorate(test):
        @functools.wraps(test)
        def counted(*args, **kwargs):
            counts[test.__name__] += 1
            return test(*args, **kwargs)

        return settings(counted)

    return decorate
