"""Which GPUs a server was given, so that their memory is waited for whoever stops it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("servers", sa.Column("gpu_indexes", sa.Text, nullable=False, server_default=""))
