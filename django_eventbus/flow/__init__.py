"""The rules about which deliveries may run now: pauses, breakers, rates, concurrency limits."""
