"""Errors: how they are read, redacted, stored and logged, and where tests cause them."""
