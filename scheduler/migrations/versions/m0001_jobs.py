"""Jobs, servers, policies, events and keys, as they were before there were migrations."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
JOB_STATES = ("QUEUED", "STARTING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED")
SERVER_STATES = ("STARTING", "READY", "STOPPING", "STOPPED")


def upgrade() -> None:
    row = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "jobs",
        sa.Column("row", row, primary_key=True),
        sa.Column("id", sa.String(64), unique=True, nullable=False),
        sa.Column("owner", sa.String(200), nullable=False, index=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.Enum(*JOB_STATES, native_enum=False, length=16), nullable=False, index=True),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("run_dir", sa.Text, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("cpu_slots", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("lease_expires_at", sa.Float),
        sa.Column("idempotency_key", sa.String(200)),
        sa.Column("code_sha256", sa.String(64)),
        sa.UniqueConstraint("owner", "idempotency_key"),
    )
    op.create_table(
        "servers",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("state", sa.Enum(*SERVER_STATES, native_enum=False, length=16), nullable=False, index=True),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("node_id", sa.String(128), nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("cpu_slots", sa.Integer, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("worker_pid", sa.Integer),
        sa.Column("front_pid", sa.Integer),
    )
    op.create_table(
        "policies",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), nullable=False, index=True),
        sa.Column("server_id", sa.String(64), sa.ForeignKey("servers.id"), nullable=False, index=True),
    )
    op.create_table(
        "events",
        sa.Column("row", row, primary_key=True),
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), nullable=False, index=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
    )
