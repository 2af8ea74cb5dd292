"""How actors share the cores of a machine: by thread counts that stand before a process first imports torch."""

_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment(threads: int) -> dict[str, str]:
    """Return the variables of an actor that computes with ``threads`` threads.

    Waiting threads sleep: engine, trainer and scorers take turns on the same cores, and a thread that spins while it
    waits takes its core from the one that works.
    """
    return {**dict.fromkeys(_COUNTS, str(threads)), "OMP_WAIT_POLICY": "PASSIVE"}
