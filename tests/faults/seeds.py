"""Chance that can be repeated: run again with EVENTBUS_FAULT_SEED set to what was printed."""

import os
import random


def seeded():
    seed = os.environ.get("EVENTBUS_FAULT_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"EVENTBUS_FAULT_SEED={seed}")
    return random.Random(seed)
