"""Users' secrets, sealed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(130), primary_key=True),
        sa.Column("owner", sa.String(64), sa.ForeignKey("users.name"), nullable=False, index=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
