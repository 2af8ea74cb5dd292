"""Every claim of docs/claims.md has a test that exists, in the tier that it stands in."""

import re

from tests.project.collected import is_full, missing, table

QUOTED = re.compile(r"`([^`]+)`")
CLAIMS = table("claims.md")
PROMISED = {
    # what the main job must show
    "one command": "A fresh clone trains with one command",
    "gain": "Held-out OCR reward rises by at least 0.10",
    "base": "The base scores between 0.40 and 0.65",
    "summary": "The printed summary has the numbers",
    "memory": "The demo takes at most 8 GB",
    "learning rate 0": "A learning rate of 0 reproduces the base",
    "shuffled rewards": "Shuffled rewards gain less than 0.03",
    "engine's record": "The manifest names engine, version, pipeline class",
    "stopped engine": "Stopping the engine fails the rollout",
    "real engine": "The demo's processes never use the diffusers engine",
    "bit-equal runs": "Deterministic runs with one seed",
    "bit-equal replicas": "Deterministic runs give the same bits with 1 and 2 replicas",
    "seeds": "All seeds of a step are distinct",
    "first latents": "Step-1 latents agree to 1e-5",
    "plain Python": "A flow and plain Python give the same bits",
    "ratio": "The importance ratio of a step's first mini-batch",
    "ratio through diffusers": "The ratio is exactly 1 through diffusers",
    "ratio off": "A replica's weight that is off by 1e-3",
    "ratio limit": "A setting stops a run whose ratio deviates",
    "rejection": "Samples that the policy did not draw are set aside",
    "loopback": "Services and actors listen on loopback alone",
    "logged metrics": "The metrics of the list are logged by their names",
    "engines": "vLLM-Omni and diffusers give the same latents",
    "no noise": "Without noise both engines equal the stock pipeline",
    "gradients of ranks": "Two FSDP2 ranks and one give per-tensor gradients",
    "parameters of ranks": "Two FSDP2 ranks and one give parameters",
    "micro-batches": "Micro-batches of 1, 4, 16 and uneven ones",
    "probe": "After each sync a probe sample",
    "bound modules": "Zero or too few bound modules",
    "full fine-tuning": "All parameters train",
    "golden samplers": "Sampler functions reproduce",
    "golden advantages": "Advantage functions reproduce",
    "golden losses": "The FlowGRPO loss and the divergences reproduce",
    "golden metrics": "Metrics reproduce",
    "metric set": "Metrics have the names of one list",
    "recomputed": "Rewards, advantages, loss, first ratio",
    "overhead script": "A script measures a step's overhead",
    "overhead": "A step costs at most 5 % more than the loop",
    "public names": "Every public name resolves",
    "make test": "`make test` passes within 25 minutes",
    "GPU install": "The README's GPU install resolves",
    "import rules": "Import rules hold",
    "torchvision": "Libraries load beside a CPU build",
    "glyph's size": "glyph takes at most 12 MB",
    "glyph's format": "It is a diffusers pipeline with a T5",
    "held-out split": "Its 128 held-out strings share no text",
    "exported adapter": "An exported adapter loads in stock",
    "exported picture": "An exported adapter reproduces",
    "exported pipeline": "So does the exported pipeline",
    "deployment": "A worker runs the deployment",
    "evaluation": "An evaluation without a trainer",
    # what bad input must end with
    "exit code": "Exit code 2, one message",
    "nothing written": "Nothing is written",
    "unknown key": "An unknown or misspelt key",
    "their key": "VeRL-Omni's spelling of a key",
    "wrong value": "A wrong type or range",
    "unknown component": "An unknown model, algorithm, reward or engine",
    "group of one": "A group of one",
    "prompts an update": "Prompts of a step that the prompts of an update",
    "uneven is legal": "Uneven micro-batches and ranks are legal",
    "size": "A size that the VAE cannot make",
    "missing profile": "A missing profile",
    "missing data": "A missing data file",
    "prompt column": "Data without a prompt column",
    "empty data": "An empty data set",
    "long prompt": "A prompt longer than an encoder takes",
    "engine package": "An engine package that is missing",
    "unreadable row": "An unreadable row in the middle",
}
"""What was promised, by a short name, and how its claim begins: a claim that is missing from the page is noticed."""


def test_every_promise_is_one_claim():
    found = {name: [claim for claim, *_ in CLAIMS if claim.startswith(start)] for name, start in PROMISED.items()}
    assert {name: claims for name, claims in found.items() if len(claims) != 1} == {}


def test_every_claim_is_checked_in_both_tiers_or_wholly_in_the_reduced_one():
    for claim, reduced, full in CLAIMS:
        assert QUOTED.findall(reduced) or QUOTED.findall(full), f"no test checks: {claim}"
        assert QUOTED.findall(full) or full == "–", f"the full tier does not check: {claim}"


def test_every_test_of_a_claim_exists():
    tests = [test for _, reduced, full in CLAIMS for test in QUOTED.findall(reduced) + QUOTED.findall(full)]
    assert not missing(sorted(set(tests)))


def test_every_test_of_a_claim_runs_in_its_tier():
    for claim, reduced, full in CLAIMS:
        for test in QUOTED.findall(reduced):
            assert not is_full(test), f"{test} is not in the reduced tier: {claim}"
        for test in QUOTED.findall(full):
            assert is_full(test), f"{test} is not in the full tier: {claim}"
