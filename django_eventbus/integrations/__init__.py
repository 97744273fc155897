"""Integrations with other software.

Only these modules import optional libraries, except for cronsim, which ``scheduling`` imports.
"""
