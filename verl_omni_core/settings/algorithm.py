"""How rewards become a gradient."""

from typing import Any

from pydantic import Field

from verl_omni_core.settings.base import Settings


class AlgorithmSettings(Settings):
    """The algorithm. A value of none takes the algorithm's own default."""

    name: str = Field("flow_grpo", description="Algorithm: a module of verl_omni_core.algorithms.")
    clip_range: float | None = Field(None, gt=0, description="How far a ratio may leave 1 before its gradient stops.")
    adv_clip: float | None = Field(None, gt=0, description="Advantages are clamped to plus and minus this.")
    kl_coef: float | None = Field(None, ge=0, description="Weight of the divergence from the reference policy.")
    global_std: bool | None = Field(None, description="Divide by the batch's spread of rewards, else by the group's.")
    normalize_std: bool | None = Field(None, description="Divide advantages by a spread at all.")
    recompute_old_log_probs: bool = Field(
        False, description="Recompute the sampling policy's log-probs in the trainer, else take the engine's."
    )
    max_ratio_deviation: float | None = Field(
        1e-3,
        gt=0,
        description="Stop when a ratio of a step's first mini-batch is further than this from 1, if the trainer's own "
        "version drew it; none never stops.",
    )
    options: dict[str, Any] = Field({}, description="Further options of the algorithm.")
