"""Users, keys with scopes, audit events; fractions of GPUs."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    connection = op.get_bind()
    keys = connection.execute(sa.text("SELECT name, owner, digest FROM api_keys")).all()
    now = time.time()
    users = op.create_table(
        "users",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("share", sa.Float, nullable=False),
        sa.Column("max_gpus", sa.Float),
        sa.Column("max_jobs", sa.Integer),
        sa.Column("disabled", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.drop_table("api_keys")
    api_keys = op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), sa.ForeignKey("users.name"), nullable=False, index=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_used_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )
    # Whoever had a key could do everything that there was: manage the jobs of its owner, who was the cluster's admin.
    owners = sorted({owner for _, owner, _ in keys})
    for owner in owners:
        connection.execute(users.insert().values(name=owner, scopes="admin", share=1.0, disabled=False, created_at=now))
    for name, owner, digest in keys:
        connection.execute(
            api_keys.insert().values(id=name, owner=owner, name=name, scopes="admin", digest=digest, created_at=now)
        )
    op.create_table(
        "audit",
        sa.Column("row", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("actor", sa.String(64), nullable=False, index=True),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("outcome", sa.String(200), nullable=False),
    )
    # SQLite keeps 0.5 in an INTEGER column as it is, and could change the type only by copying tables that others refer to.
    if connection.dialect.name != "sqlite":
        for table in ("jobs", "servers"):
            op.alter_column(table, "gpus", type_=sa.Float, existing_nullable=False)
