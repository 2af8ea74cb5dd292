"""The whole tree: what one run is."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from verl_omni_core.settings.algorithm import AlgorithmSettings
from verl_omni_core.settings.base import Settings
from verl_omni_core.settings.data import DataSettings
from verl_omni_core.settings.model import ModelSettings
from verl_omni_core.settings.retention import RetentionSettings
from verl_omni_core.settings.reward import RewardSettings
from verl_omni_core.settings.rollout import RolloutSettings
from verl_omni_core.settings.sampler import SamplerSettings
from verl_omni_core.settings.training import TrainingSettings


class RunSettings(Settings):
    """Length, identity and place of a run."""

    id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the run; none derives one from time."
    )
    store: str = Field("runs", description="Folder that holds all runs, or `s3://bucket/prefix`.")
    steps: int = Field(30, ge=0, description="Training steps.")
    seed: int = Field(42, ge=0, lt=2**63, description="Root of every derived seed.")
    deterministic: bool = Field(
        False, description="Bit-equal repeats: fixed batch shapes, hashed routing, deterministic kernels."
    )
    validate_every: int = Field(10, ge=0, description="Steps between validations; 0: only before and after.")
    validate_before: bool = Field(True, description="Validate before the first step.")
    checkpoint_every: int = Field(10, ge=0, description="Steps between checkpoints; 0: only at the end.")
    images_every: int = Field(5, ge=0, description="Steps between image grids of fixed prompts; 0: never.")
    resume: Literal["auto", "disable"] | Annotated[int, Field(strict=True, ge=0)] = Field(
        "auto",
        description="What a run that exists does: go on where it stopped; be refused; or go back to this step, and "
        "what came after it is set aside.",
    )
    end_by: AwareDatetime | None = Field(
        None, description="When the machine's time ends: before that the run saves and stops; none: it does not."
    )
    end_margin_s: float = Field(
        60, ge=0, description="Time that is left over at run.end_by, beyond the longest step and a snapshot, seconds."
    )


class WeightsSettings(Settings):
    """How a policy version reaches the replicas."""

    sync_interval: int = Field(1, ge=1, description="Training steps between weight syncs.")
    timeout_s: float = Field(300, gt=0, description="Deadline of one sync, seconds.")
    probe: bool = Field(
        False, description="After each sync compare a probe sample of every replica with the trainer's own."
    )
    probe_tolerance: float = Field(1e-4, gt=0, description="Largest difference of final latents between probe samples.")


class DurabilitySettings(Settings):
    """What the run leaves on disk, and how often it starts again."""

    level: Literal["auto", "none", "ledger", "snapshot"] = Field(
        "auto",
        description="When the trainer's whole state is committed: after every step (snapshot), every snapshot_every "
        "steps (ledger), only as run.checkpoint_every says (none); auto: snapshot for LoRA, else ledger.",
    )
    snapshot_every: int = Field(10, ge=1, description="Steps between snapshots at level ledger.")
    checkpoint_contents: Literal["all", "weights"] = Field(
        "all",
        description="What checkpoints of run.checkpoint_every keep: all that training goes on from, or the weights.",
    )
    snapshot_timeout_s: float = Field(1800, gt=0, description="Deadline of writing a snapshot, seconds.")
    min_free_gb: float = Field(1.0, ge=0, description="Free space below which no stage starts, GB.")
    no_progress_budget: int = Field(
        3, ge=1, description="Starts in a row that may break off without a new stage or shard before one is refused."
    )
    retention: RetentionSettings = Field(RetentionSettings(), description="How much of old steps stays on the disk.")

    @model_validator(mode="after")
    def _something_to_resume_from(self) -> "DurabilitySettings":
        if self.level == "none" and self.checkpoint_contents == "weights":
            raise ValueError(
                "durability.level is none and durability.checkpoint_contents is weights, which leaves nothing to "
                "resume from; use level ledger, or contents all"
            )
        return self


class TrackingSettings(Settings):
    """Where numbers and pictures go besides the run's own tables."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files into the run's folder.")
    grid_prompts: int = Field(8, ge=1, description="Fixed prompts of the image grid.")


class ClusterSettings(Settings):
    """The Ray cluster that holds the actors."""

    ray_address: str | None = Field(None, description="Address of a Ray cluster; none: RAY_ADDRESS or a local head.")
    object_store_mb: int = Field(300, ge=80, description="Object store of a local head, MB.")
    keep_actors: bool = Field(
        False, description="Leave the actors of a finished run alive, so that it goes on at once with more steps."
    )
    actor_timeout_s: float = Field(600, gt=0, description="Deadline of starting the actors, seconds.")


class RunConfig(Settings):
    """One run, resolved. Reads no environment: :mod:`verl_omni_core.settings.loader` does, where a command is typed."""

    run: RunSettings = Field(RunSettings(), description="Length, identity and place of the run.")
    model: ModelSettings = Field(ModelSettings(), description="The generator that is trained.")
    data: DataSettings = Field(DataSettings(), description="Prompts.")
    sampler: SamplerSettings = Field(SamplerSettings(), description="How samples are drawn.")
    rollout: RolloutSettings = Field(RolloutSettings(), description="The engine and its replicas.")
    reward: RewardSettings = Field(RewardSettings(), description="Scorers and failure policy.")
    algorithm: AlgorithmSettings = Field(AlgorithmSettings(), description="How rewards become a gradient.")
    training: TrainingSettings = Field(TrainingSettings(), description="Trainer and optimizer.")
    weights: WeightsSettings = Field(WeightsSettings(), description="Weight sync.")
    durability: DurabilitySettings = Field(DurabilitySettings(), description="What the run leaves on disk.")
    tracking: TrackingSettings = Field(TrackingSettings(), description="Trackers and pictures.")
    cluster: ClusterSettings = Field(ClusterSettings(), description="Ray.")

    @model_validator(mode="after")
    def _updates_divide_the_step(self) -> "RunConfig":
        update = self.training.prompts_per_update
        if update is not None and self.data.prompts_per_step % update:
            legal = [n for n in range(1, self.data.prompts_per_step + 1) if self.data.prompts_per_step % n == 0]
            raise ValueError(
                f"training.prompts_per_update is {update}, which does not divide data.prompts_per_step "
                f"{self.data.prompts_per_step}; use one of {legal}"
            )
        return self
