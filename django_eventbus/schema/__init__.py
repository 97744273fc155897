"""The formats of the values in database columns, and SQL that differs between databases.

Models, migrations and the store use these modules. Examples are the rules for names and payloads,
the states in ``deliveries``, the clock of the database, and partial indexes.
"""
