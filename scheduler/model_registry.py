"""The models that a cluster knows by name: those that the settings register, and the built-in ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentinker.config.base import nearest
from opentinker.config.job import JobConfig
from opentinker.errors import ConfigError, UnknownModelError
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.imports import load
from opentinker.scheduler.placement import Demand
from opentinker.scheduler.settings import HUB, RegisteredModel, Settings


def _bytes_per_parameter(config: JobConfig) -> int:
    """Of GPU memory, at least: what engine and trainer hold of the base model's weights, without caches and activations."""
    each = 4 if config.server().dtype == "float32" else 2
    if not config.trains:
        return each
    # Two copies of the weights; of those that are trained also the float32 gradient, master and two moments. In float32 the
    # weight is its own master. The critic of a policy that trains them has a copy for itself.
    if config.lora is not None:
        return 2 * each
    return 2 * each + (16 if each == 2 else 12) + (each if config.policy_critic is not None else 0)


class ModelRegistry:
    """What a `base_model` means. Methods that say so read files; call them in a thread."""

    def __init__(self, settings: Settings) -> None:
        self._models = settings.models
        self._only_registered = settings.only_registered_models
        self._paths = (settings.known_models, settings.describe_model)

    def location(self, name: str) -> str:
        """What a server is told to load: a directory, a built-in name, or `hub:` and a hub id."""
        entry = self._models.get(name)
        return name if entry is None else entry.location

    def check(self, config: JobConfig, check_model: Callable[[str], None]) -> None:
        """Whether the job's model can be loaded, as far as that can be told without loading it. Reads files.

        Raises:
            UnknownModelError: it is not registered, or its files are not there; the hint names the nearest.
            ConfigError: the job's dtype is not one that the model is registered for.
        """
        name = config.base_model
        entry = self._models.get(name)
        if entry is None:
            self._check_unregistered(name, check_model)
            return
        dtype, key = config.server().dtype, "trainer.dtype" if config.trains else "dtype"
        if entry.dtype is not None and dtype != entry.dtype:
            raise ConfigError(f"{key}: '{name}' is registered for {entry.dtype}, not for {dtype}", hint=f"{key}={entry.dtype}")
        if not entry.location.startswith(HUB):
            try:
                check_model(entry.location)
            except UnknownModelError as error:
                raise UnknownModelError(
                    f"'{name}' is registered, but its files cannot be used: {error.detail}", hint="ask your administrator"
                ) from error

    def _check_unregistered(self, name: str, check_model: Callable[[str], None]) -> None:
        known = [*self._models, *load(self._paths[0])()]
        if name.startswith(HUB) or (self._only_registered and name not in known):
            raise UnknownModelError(
                f"base model '{name}' is not registered on this cluster",
                hint=f"{nearest(name, known)}; `opentinker models` lists them",
            )
        try:
            check_model(name)
        except UnknownModelError as error:
            if self._models and "/" not in name and name not in known:
                error.hint = f"{nearest(name, known)}; `opentinker models` lists them"
            raise

    def check_memory(self, config: JobConfig, demand: Demand, use: Mapping[str, Sequence[GpuUse]]) -> None:
        """Whether the weights alone could fit the GPUs that the job asks for, where both sizes are known. Reads files.

        Raises:
            ConfigError: they could not, on any GPU of the cluster.
        """
        entry, name = self._models.get(config.base_model), config.base_model
        largest = max((gpu.memory_bytes for gpus in use.values() for gpu in gpus), default=0)
        if not demand.gpus or not largest:
            return
        parameters = (entry and entry.size) or load(self._paths[1])(self.location(name))["parameters"]
        room = largest * demand.gpus
        needed = (parameters or 0) * _bytes_per_parameter(config)
        if needed > room:
            raise ConfigError(
                f"base_model: '{name}' has {parameters:,} parameters, which need {needed / 2**30:.0f} GiB at least; "
                f"{demand} of this cluster have {room / 2**30:.0f} GiB",
                hint="ask for more GPUs, train an adapter (lora), or take a smaller model",
            )

    def listing(self) -> list[dict[str, Any]]:
        """What the API tells of every model, by name. Reads files."""
        known, describe = (load(path) for path in self._paths)
        rows = {name: self._row(name, None, describe(name)) for name in known()}
        for name, entry in self._models.items():
            rows[name] = self._row(name, entry, describe(entry.location))
        return [rows[name] for name in sorted(rows)]

    def _row(self, name: str, entry: RegisteredModel | None, found: dict[str, Any]) -> dict[str, Any]:
        row = {"name": name, "path": "", "source": "built-in", **found}
        if entry is not None:
            row["path"], row["source"] = entry.path, "hub" if entry.location.startswith(HUB) else "directory"
            row["parameters"] = entry.size or row["parameters"]
            row["dtype"] = entry.dtype or row["dtype"]
        return row
