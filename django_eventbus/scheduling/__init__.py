"""Cron arithmetic: when a schedule fires."""
