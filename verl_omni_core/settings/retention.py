"""What may be deleted of a run while it goes on."""

from pydantic import Field

from verl_omni_core.settings.base import Settings


class RetentionSettings(Settings):
    """How much of old steps stays on the disk.

    What replay needs after the newest verified snapshot stays in any case, as do manifests, prompts, requests, rewards,
    advantages, metrics, the ledger, and the weights that validation judged or that training began with.
    """

    trajectory_steps: int | None = Field(
        None,
        ge=0,
        description="Newest steps that keep trajectories, embeddings, log-probs and reference means; none: all steps.",
    )
    media_share: float = Field(
        1.0, ge=0, le=1, description="Share of the media shards that stay of a step whose trajectories go."
    )
    checkpoints: int | None = Field(
        2,
        ge=1,
        description="Newest snapshots that stay, besides those at multiples of run.checkpoint_every; none: all.",
    )
    weight_steps: int | None = Field(
        None,
        ge=1,
        description="Newest steps that keep the weights of their sync, besides those with a validation and the "
        "multiples of run.checkpoint_every; none: all.",
    )
