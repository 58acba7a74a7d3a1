"""MLflow."""

import time
from collections.abc import Mapping

from opentinker.config.sinks import MlflowConfig
from opentinker.training.sinks.base import SinkRun

_TAG = "opentinker.run"
"""By which a run that goes on is found again."""


class MlflowSink:
    def __init__(self, config: MlflowConfig, run: SinkRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=config.tracking_uri or f"sqlite:///{run.folder}/mlflow.db")
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = self._client.create_experiment(config.experiment) if found is None else found.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'") if run.resumed else []
        if earlier:
            self._run: str = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {_TAG: run.id, "mlflow.runName": run.name}
            self._run = self._client.create_run(experiment, tags=tags).info.run_id
            for name in ("kind", "base_model"):
                self._client.log_param(self._run, name, run.config.get(name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow's names know no '@', which pass@k has.
        metrics = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
