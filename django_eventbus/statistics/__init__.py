"""Statistics of workers per minute, and the problems that operators should know."""
