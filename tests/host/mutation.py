"""Planting bugs: a module as it would be with one piece of its source replaced."""

import inspect


def mutant(module, old: str, new: str) -> dict:
    """The names of `module`, run from its source with `old` replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the planted bug replaces {old!r}, which is there {source.count(old)} times"
    names = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(old, new), "<mutant>", "exec"), names)
    return names
