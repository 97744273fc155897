"""The bus and other software: each module needs what it is named after, nothing else does."""
