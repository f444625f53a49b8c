"""What can go wrong, by whose fault it is: the caller's, the model's, the load's or ours."""


class HybridJaxError(Exception):
    """Base of every error this library raises on purpose."""


class InvalidRequest(HybridJaxError, ValueError):
    """The request can never be served as it is. Nothing was allocated for it."""


class QueueFull(HybridJaxError):
    """Too many requests wait already; the same request may succeed later."""


class ModelError(HybridJaxError, ValueError):
    """A model directory or its weights cannot be used."""


class SnapshotError(HybridJaxError, ValueError):
    """A snapshot cannot be made, read or restored."""


class ReferenceFileError(HybridJaxError, ValueError):
    """A recorded reference cannot be read, or is of another model."""


class SnapshotTooLarge(SnapshotError):
    """A snapshot needs more pages or slots than are free now."""


class CachesFull(HybridJaxError):
    """Sessions hold the pages or slots that are needed. Nothing was computed."""


class CannotRewind(HybridJaxError, ValueError):
    """What a session remembered at that length is gone. Nothing has changed."""


class StateOwnerMismatch(HybridJaxError):
    """A sequence's state slot held another sequence's state. The sequence was ended."""


class NonFiniteLogits(HybridJaxError):
    """A sequence's logits held NaN or Inf. The sequence was ended."""


class NothingToSample(HybridJaxError):
    """What a request asked for excluded every token. The completion was ended."""


class GrammarError(HybridJaxError):
    """A completion cannot go on in the grammar its request asked for. The completion was ended."""


class StepFailed(HybridJaxError):
    """The step that a sequence took part in raised. The sequence was ended."""


class EngineDead(HybridJaxError):
    """The engine was closed or could not recover from an error; it accepts nothing any more."""


class IntegrityError(HybridJaxError, AssertionError):
    """An id of a page, slot or row is not in exactly one place: a bug of this library."""
