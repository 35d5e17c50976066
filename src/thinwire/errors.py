"""Errors that thinwire raises. Each message says what was expected, what came, and what to do."""


class ThinwireError(Exception):
    """Base class of every error that is thinwire's own."""


class RecipeError(ThinwireError, ValueError):
    """A recipe, compressor or aggregator setting that cannot be used."""


class PlanError(ThinwireError, ValueError):
    """A policy that does not fit the model, or a plan that differs between ranks."""


class OptimizerError(ThinwireError, ValueError):
    """Settings of an optimizer that are out of range, or parameters or gradients that it cannot use."""


class AttachError(ThinwireError, RuntimeError):
    """A model or process group to which thinwire cannot be attached."""


class WireError(ThinwireError, ValueError):
    """Bytes that are not what the layout says; nothing was written."""


class ScheduleError(ThinwireError, RuntimeError):
    """An exchange whose rounds differ from its schedule. A bug in an aggregator."""


class RankLostError(ThinwireError, RuntimeError):
    """A peer stopped answering during an exchange. The message names it."""


class ServerError(ThinwireError, RuntimeError):
    """A parameter server that stopped answering, or refused what it was told. The message names it."""


class NonFiniteError(ThinwireError, ArithmeticError):
    """A gradient held inf or nan and no GradScaler was given to skip the step."""


class LossScaleError(ThinwireError, RuntimeError):
    """The GradScalers of ranks have different scales, so that their gradients are in different units."""


class ReplicaError(ThinwireError, RuntimeError):
    """Ranks that hold different parameters. The message names them and the first parameter."""


class LostGradientError(ThinwireError, ArithmeticError):
    """Gradients that are not 0 were delivered as 0 in every element."""


class StateError(ThinwireError, ValueError):
    """Saved state that does not fit this model, plan or world size."""


class ProfileError(ThinwireError, ValueError):
    """A profile of a cluster or model that cannot be: a rate below 0, a missing field, another model's."""


class LabError(ThinwireError, RuntimeError):
    """The emulated network could not be made, or a run in it failed."""
