"""``verl-omni down``: stop the local services that ``verl-omni train`` started."""


def down() -> None:
    """Stop the Ray head and the Prefect server of this machine that this command's family started, and only those.

    Actors of runs on that Ray head end with it; what they committed stays.
    """
    from verl_omni_core.cluster import prefect_server, ray_head, services

    for name in (ray_head.NAME, prefect_server.NAME):
        print(f"{name}: {'stopped' if services.stop(name) else 'was not running'}")
