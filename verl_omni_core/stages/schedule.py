"""When something that does not happen every step is due."""


def due(step: int, every: int, last: int) -> bool:
    """Say whether an event is due after ``step``: every so many steps (0: never) and after the last one.

    Args:
        step: 1-based.
        every: steps between events; 0 for none.
        last: the step after which it is due in any case; 0 for none.
    """
    return (every > 0 and step % every == 0) or step == last


def policy_version(step: int, sync_interval: int) -> int:
    """Return the version that draws ``step``: the newest that was synced before it."""
    return (step - 1) // sync_interval * sync_interval
