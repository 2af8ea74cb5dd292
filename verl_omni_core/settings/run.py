"""The whole tree: what one run is."""

from pydantic import Field, model_validator

from verl_omni_core.settings.algorithm import AlgorithmSettings
from verl_omni_core.settings.base import Settings
from verl_omni_core.settings.data import DataSettings
from verl_omni_core.settings.model import ModelSettings
from verl_omni_core.settings.reward import RewardSettings
from verl_omni_core.settings.rollout import RolloutSettings
from verl_omni_core.settings.sampler import SamplerSettings
from verl_omni_core.settings.training import TrainingSettings


class RunSettings(Settings):
    """Length, identity and place of a run."""

    id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the run; none derives one from time."
    )
    store: str = Field("runs", description="Folder that holds all runs.")
    steps: int = Field(30, ge=0, description="Training steps.")
    seed: int = Field(42, ge=0, lt=2**63, description="Root of every derived seed.")
    deterministic: bool = Field(
        False, description="Bit-equal repeats: fixed batch shapes, hashed routing, deterministic kernels."
    )
    validate_every: int = Field(10, ge=0, description="Steps between validations; 0: only before and after.")
    validate_before: bool = Field(True, description="Validate before the first step.")
    checkpoint_every: int = Field(10, ge=0, description="Steps between checkpoints; 0: only at the end.")
    images_every: int = Field(5, ge=0, description="Steps between image grids of fixed prompts; 0: never.")


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

    min_free_gb: float = Field(1.0, ge=0, description="Free space below which no stage starts, GB.")
    no_progress_budget: int = Field(
        3, ge=1, description="Starts in a row that may break off without a new stage or shard before one is refused."
    )


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
