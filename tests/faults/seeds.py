"""Repeatable random numbers: set EVENTBUS_FAULT_SEED to the printed seed to repeat a run."""

import os
import random


def seeded():
    seed = os.environ.get("EVENTBUS_FAULT_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"EVENTBUS_FAULT_SEED={seed}")
    return random.Random(seed)
