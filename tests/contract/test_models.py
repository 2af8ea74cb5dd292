"""Promises that every model adapter keeps, on its own tiny pipeline."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError
from verl_omni_core.models._contract import DenoiserAdapter, Geometry, Schedule

LENGTH, STEPS, ROWS = 16, 4, 4
NOISE_LEVEL = 0.7


@dataclass
class Setting:
    """One adapter with its tiny pipeline loaded."""

    adapter: DenoiserAdapter
    folder: str
    geometry: Geometry
    schedule: Schedule
    denoiser: torch.nn.Module
    conditioning: dict[str, torch.Tensor]

    def rows(self, count: int) -> dict[str, torch.Tensor]:
        return {name: tensor.expand(count, *tensor.shape) for name, tensor in self.conditioning.items()}

    def velocity(self, latents: torch.Tensor, step: int, guidance_scale: float) -> torch.Tensor:
        timestep = self.schedule.timesteps[step].expand(len(latents))
        return self.adapter.velocity(self.denoiser, latents, timestep, self.rows(len(latents)), guidance_scale)

    def move(
        self, latents: torch.Tensor, velocity: torch.Tensor, step: int, **given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One stochastic move: latents after it and their log-prob [B]."""
        sigmas = self.schedule.sigmas
        rule = registry.component("sampler", "flow_sde")
        moved = rule.step(
            latents,
            velocity,
            sigma=sigmas[step].expand(len(latents)),
            sigma_next=sigmas[step + 1].expand(len(latents)),
            sigma_second=float(sigmas[1]),
            noise_level=NOISE_LEVEL,
            **given,
        )
        return moved.prev_sample, moved.log_prob


@pytest.fixture(scope="module", params=registry.names("model"))
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    adapter = registry.component("model", request.param).build(registry.options("model", request.param, {}))
    folder = str(tmp_path_factory.mktemp(request.param))
    adapter.build_tiny(folder, seed=1)
    decoder = adapter.load_decoder(folder, torch.float32)
    geometry = adapter.geometry(32, 48, decoder.config)
    return Setting(
        adapter,
        folder,
        geometry,
        adapter.schedule(geometry, STEPS, adapter.scheduler_config(folder), "uniform"),
        adapter.load_denoiser(folder, torch.float32),
        dict(adapter.encode(adapter.load_encoders(folder, torch.float32), "a red cube", "", LENGTH)),
    )


def test_the_outline_has_the_networks_modules_and_shapes_without_weights(setting: Setting) -> None:
    outline = setting.adapter.outline_denoiser(setting.folder)
    assert [name for name, _ in outline.named_modules()] == [name for name, _ in setting.denoiser.named_modules()]
    shapes = {name: tensor.shape for name, tensor in setting.denoiser.named_parameters()}
    assert {name: tensor.shape for name, tensor in outline.named_parameters()} == shapes
    assert all(tensor.is_meta for tensor in outline.parameters())


def _latents(setting: Setting, count: int = ROWS) -> torch.Tensor:
    return setting.adapter.initial_latents(
        setting.geometry, [torch.Generator().manual_seed(seed) for seed in range(count)]
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@torch.no_grad()
def test_ratio_is_exactly_one_before_any_update(setting: Setting, guidance_scale: float) -> None:
    latents, generator = _latents(setting), torch.Generator().manual_seed(7)
    for step in range(STEPS - 1):
        noise = torch.randn(latents.shape, generator=generator)
        moved, sampled = setting.move(latents, setting.velocity(latents, step, guidance_scale), step, noise=noise)
        _, replayed = setting.move(latents, setting.velocity(latents, step, guidance_scale), step, prev_sample=moved)
        assert torch.equal((replayed - sampled).exp(), torch.ones(ROWS)), step
        latents = moved


@torch.no_grad()
def test_replay_does_not_depend_on_the_batch_size(setting: Setting) -> None:
    latents = _latents(setting)
    together = setting.velocity(latents, 0, 4.5)
    alone = torch.cat([setting.velocity(row[None], 0, 4.5) for row in latents])
    # a velocity moves the log-prob by much less than itself; the ratio bound of 1e-6 is checked on the ratio
    moved, sampled = setting.move(latents, together, 1, noise=torch.zeros_like(latents))
    _, replayed = setting.move(latents, alone, 1, prev_sample=moved)
    assert ((replayed - sampled).exp() - 1).abs().max() <= 1e-6


@torch.no_grad()
def test_rows_of_a_batch_do_not_see_each_other(setting: Setting) -> None:
    latents = _latents(setting)
    changed = latents.clone()
    changed[1:] += 1
    before, after = setting.velocity(latents, 1, 1.0), setting.velocity(changed, 1, 1.0)
    assert torch.equal(before[0], after[0])
    assert (before[1:] - after[1:]).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_conditioning_has_the_promised_names_and_no_batch_axis(setting: Setting) -> None:
    facts = setting.adapter.facts
    encoders = setting.adapter.load_encoders(setting.folder, torch.float32)
    plain = setting.adapter.encode(encoders, "a red cube", None, LENGTH)
    assert tuple(plain) == facts.conditioning
    assert tuple(setting.conditioning) == facts.conditioning + facts.negative_conditioning
    again = setting.adapter.encode(encoders, "a red cube", None, LENGTH)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(name.startswith("negative_") for name in facts.negative_conditioning)


def test_schedule_falls_from_one_to_zero(setting: Setting) -> None:
    for grid in ("scheduler", "uniform"):
        config = setting.adapter.scheduler_config(setting.folder)
        schedule = setting.adapter.schedule(setting.geometry, STEPS, config, grid)
        assert schedule.sigmas.dtype == schedule.timesteps.dtype == torch.float32
        assert schedule.sigmas.shape == (STEPS + 1,) and schedule.timesteps.shape == (STEPS,)
        assert schedule.sigmas[0] == 1 and schedule.sigmas[-1] == 0
        assert (schedule.sigmas.diff() < 0).all()


def test_latents_of_a_row_depend_on_its_generator_alone(setting: Setting) -> None:
    latents = _latents(setting)
    assert latents.dtype == torch.float32 and latents.shape == (ROWS, *setting.geometry.latent_shape)
    alone = setting.adapter.initial_latents(setting.geometry, [torch.Generator().manual_seed(2)])
    assert torch.equal(latents[2], alone[0])


def test_decoding_returns_bytes_of_the_promised_shape(setting: Setting) -> None:
    pixels = setting.adapter.decode(setting.adapter.load_decoder(setting.folder, torch.float32), _latents(setting))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (ROWS, 3, setting.geometry.height, setting.geometry.width)


def test_saved_and_reloaded_network_has_the_same_velocity(setting: Setting, tmp_path: Path) -> None:
    setting.denoiser.save_pretrained(tmp_path / "copy")
    again = type(setting.denoiser).from_pretrained(tmp_path / "copy")
    latents, timestep = _latents(setting), torch.full((ROWS,), 500.0)
    with torch.no_grad():
        ours, theirs = (
            setting.adapter.velocity(network, latents, timestep, setting.rows(ROWS), 1.0)
            for network in (setting.denoiser, again.eval())
        )
    assert torch.equal(ours, theirs)


def test_every_lora_target_matches_and_only_adapters_get_a_gradient(setting: Setting) -> None:
    from peft import LoraConfig

    network = setting.adapter.load_denoiser(setting.folder, torch.float32)
    names = [name for name, _ in network.named_modules()]
    for target in setting.adapter.facts.lora_targets:
        assert any(name.endswith(target) for name in names), target
    network.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=list(setting.adapter.facts.lora_targets)))
    timestep = torch.full((ROWS,), 500.0)
    setting.adapter.velocity(network, _latents(setting), timestep, setting.rows(ROWS), 1.0).square().mean().backward()
    with_gradient = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in network.named_parameters() if "lora_" in name}


def test_shard_blocks_and_classes_exist(setting: Setting) -> None:
    classes = {type(module).__name__ for module in setting.denoiser.modules()}
    assert set(setting.adapter.facts.shard_blocks) <= classes
    assert setting.adapter.facts.transformer_class in classes


def test_impossible_sizes_name_legal_ones(setting: Setting) -> None:
    decoder = setting.adapter.load_decoder(setting.folder, torch.float32)
    with pytest.raises(ConfigError, match=r"use \d+"):
        setting.adapter.geometry(33, 32, decoder.config)


def test_tokens_and_limits_are_counted_for_every_tokenizer(setting: Setting) -> None:
    tokenizers = setting.adapter.load_encoders(setting.folder, torch.float32).tokenizers
    counts = setting.adapter.token_counts(tokenizers, "a red cube " * 50, LENGTH)
    assert counts.keys() == tokenizers.keys()
    assert all(tokens > limit > 0 for tokens, limit in counts.values())
