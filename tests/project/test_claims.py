"""Every claim of docs/claims.md has a test that exists, in the tier that it stands in."""

import re

from tests.project.collected import is_full, missing, table

QUOTED = re.compile(r"`([^`]+)`")
CLAIMS = table("claims.md")


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
