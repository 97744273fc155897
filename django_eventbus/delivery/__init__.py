"""Deliver a claimed batch: transactions, handler calls, deadlines and settlement."""
