"""The formats of columns, shared by models, migrations and the store."""
