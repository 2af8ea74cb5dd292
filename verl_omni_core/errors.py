"""One exception tree. Every error says what was seen, what was expected, and what to do.

Each class is also the standard library's type of the same meaning, so callers can catch either. All pickle, because
they cross process boundaries; none takes constructor arguments beyond its message.
"""


class VerlOmniError(Exception):
    """Base of all errors that this package raises on purpose."""

    retryable = False
    """Whether doing the same thing again, unchanged, may succeed."""
    exit_code = 1
    """Of a command that ends with it: 2 for what cannot start, 1 for what failed."""


class ConfigError(VerlOmniError, ValueError):
    """Settings that cannot work; raised before any actor starts."""

    exit_code = 2


class UnknownNameError(ConfigError, LookupError):
    """A component, setting or profile that does not exist; the message lists the nearest known names."""


class DataError(VerlOmniError, ValueError):
    """A data set, row or prompt that cannot be used."""

    exit_code = 2


class NoProgressError(VerlOmniError, RuntimeError):
    """A run that broke off again and again at the same place, and is not started once more."""

    exit_code = 2


class ContractError(VerlOmniError, ValueError):
    """A shape, dtype, count or checksum that breaks a promise between two parts; never retried blindly."""


class NumericError(VerlOmniError, ArithmeticError):
    """Non-finite gradients, rewards or pixels beyond what the settings tolerate."""


class OffPolicyError(NumericError):
    """Samples that the policy which learns from them has not drawn, where it should have."""


class EngineError(VerlOmniError, RuntimeError):
    """A generation engine that failed, stopped or answered something impossible."""

    retryable = True


class StageLost(VerlOmniError, RuntimeError):
    """An actor died in the middle of a stage; the stage can be done again once the actor is back."""

    retryable = True


class DeadlineError(VerlOmniError, TimeoutError):
    """A wait that ran past its deadline."""

    retryable = True


class StoreError(VerlOmniError, OSError):
    """An artifact that is missing, torn or different from its manifest, or a disk without room."""


class FencedError(VerlOmniError, PermissionError):
    """A command or commit from an owner that no longer owns the run."""


class ScorerError(VerlOmniError, RuntimeError):
    """A reward scorer that failed on one sample; becomes a missing score with a reason."""

    retryable = True
