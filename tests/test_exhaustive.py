"""What `exhaustive` leaves out, and what it must not."""

import itertools
import types


class Item:
    """Stands for pytest's: what has `callspec.params`."""

    def __init__(self, **params):
        self.callspec = types.SimpleNamespace(params=params)


def test_every_value_of_every_argument_is_left(request):
    [covering] = [
        plugin._covering
        for plugin in request.config.pluginmanager.get_plugins()
        if hasattr(plugin, "_covering")
    ]
    arguments = {"a": [object() for _ in range(5)], "b": [{}, {}, []], "c": [1.0, None]}
    items = [
        Item(**dict(zip(arguments, values, strict=True)))
        for values in itertools.product(*arguments.values())
    ]
    chosen = [item.callspec.params for item in covering(items)]
    for name, values in arguments.items():
        assert {id(c[name]) for c in chosen} == {id(value) for value in values}
    assert len(chosen) == 5
    # One alone, as when it is asked for by its name, stays.
    assert covering(items[7:8]) == {items[7]}
