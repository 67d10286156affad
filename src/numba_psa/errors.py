"""What can go wrong, as types. Each is also the builtin that a caller who does not know this package would catch."""


class NumbaPSAError(Exception):
    """Base of every error this package raises on purpose."""


class ShapeError(NumbaPSAError, ValueError):
    """A size is wrong; the message names it, what it is, and what would fit."""


class DTypeError(NumbaPSAError, TypeError):
    """An element type, or the type of a count, is not one that the operation takes."""


class BackendUnavailableError(NumbaPSAError, RuntimeError):
    """The implementation asked for cannot run here; the message names what is missing and how to get it."""


class ParameterError(NumbaPSAError, ValueError):
    """A scalar parameter, such as softmax_scale, has a value that makes no sense."""


class WeightsError(NumbaPSAError, ValueError):
    """A weight file cannot be read, or does not hold what a layer needs; the message lists every name that is wrong."""
