"""Alembic migrations; `store.migrate` runs them. See `schema.py`."""
