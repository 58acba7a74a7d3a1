"""Where a run's metrics go besides its own files."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from opentinker.config.base import Config
from opentinker.config.requirements import SECRET_NAME


class _Sink(Config):
    package: ClassVar[str]
    """What has to be installed where the driver runs."""

    run_name: str = ""
    """What the run is called there. Empty = the name of the run's folder, which is the job's id."""

    def secrets(self) -> dict[str, str]:
        """Environment variable -> name of the secret of the job's owner that the driver gets in it."""
        return {}


class TensorBoardConfig(_Sink):
    """Event files below the run's folder, or below another one."""

    package: ClassVar[str] = "tensorboard"

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Where the event files are; each run has a folder of its own there. Empty = `tensorboard/` in the run's folder."""


class WandbConfig(_Sink):
    """Weights & Biases."""

    package: ClassVar[str] = "wandb"

    kind: Literal["wandb"] = "wandb"
    project: str = "opentinker"
    """The project there."""
    entity: str = ""
    """The team there; empty = the key's own default."""
    mode: Literal["online", "offline"] = "online"
    """'offline' writes to the run's folder, for `wandb sync`."""
    api_key_secret: Annotated[str, Field(pattern=rf"^({SECRET_NAME})?$")] = ""
    """Name of a secret of yours with the API key (`opentinker secrets set NAME`); the driver of a submitted job gets it as
    WANDB_API_KEY. `opentinker train` takes that variable from your own environment."""

    def secrets(self) -> dict[str, str]:
        return {"WANDB_API_KEY": self.api_key_secret} if self.api_key_secret else {}


class MlflowConfig(_Sink):
    """MLflow."""

    package: ClassVar[str] = "mlflow"

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "opentinker"
    """The experiment there."""
    tracking_uri: str = ""
    """A server's address, or a database's, such as `sqlite:////shared/mlflow.db`. Empty = `mlflow.db` in the run's folder."""
    token_secret: Annotated[str, Field(pattern=rf"^({SECRET_NAME})?$")] = ""
    """Name of a secret of yours with the server's token; the driver of a submitted job gets it as MLFLOW_TRACKING_TOKEN."""

    def secrets(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_TOKEN": self.token_secret} if self.token_secret else {}


class TrackioConfig(_Sink):
    """Trackio, which keeps runs in a local database."""

    package: ClassVar[str] = "trackio"

    kind: Literal["trackio"] = "trackio"
    project: str = "opentinker"
    """The project there."""


AnySink = Annotated[
    TensorBoardConfig | WandbConfig | MlflowConfig | TrackioConfig,
    Field(discriminator="kind"),
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]
Sinks = tuple[AnySink, ...]


def secrets_of(sinks: Iterable[Any]) -> dict[str, str]:
    """Environment variable -> name of a secret, of all sinks."""
    return {variable: name for sink in sinks for variable, name in sink.secrets().items()}
