"""How large the suite's run is."""

STEPS, PROMPTS, GROUP, PACK = 3, 2, 4, 2
SAMPLES = PROMPTS * GROUP
PACKS = SAMPLES // PACK
