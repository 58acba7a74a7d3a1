"""What a rollout engine that is split from its trainer occupies, and where."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for table in ("jobs", "servers"):
        op.add_column(table, sa.Column("rollout_gpus", sa.Float, nullable=False, server_default="0"))
        op.add_column(table, sa.Column("rollout_cpu_slots", sa.Integer, nullable=False, server_default="0"))
    op.add_column("servers", sa.Column("rollout_node_id", sa.String(128), nullable=False, server_default=""))
    op.add_column("servers", sa.Column("rollout_gpu_indexes", sa.Text, nullable=False, server_default=""))
