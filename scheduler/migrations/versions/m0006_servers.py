"""Servers beside a job's own: what they occupy, and which is which."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("further", sa.Text, nullable=False, server_default=""))
    op.add_column("servers", sa.Column("name", sa.String(64), nullable=False, server_default=""))
