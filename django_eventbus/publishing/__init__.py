"""Publishing: validate, limit and insert events; let a handler run once per idempotency key."""
