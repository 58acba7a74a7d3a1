"""The commands of a policy as plain functions over the worker's state. The table is in docs/architecture.md."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentinker.checkpoint_marks import resolve
from opentinker.checkpoints import MANIFEST, Checkpoint, checkpoints, find, parse_folder, parse_name, versioned
from opentinker.client.messages import (
    PAIR_LOSSES,
    SCALAR_LOSSES,
    TOKEN_SCORES,
    AdamParams,
    CriticStep,
    Datum,
    LossConfig,
    Minibatch,
    PolicySpec,
    TokenScore,
    validate,
)
from opentinker.config.base import nearest
from opentinker.errors import CheckpointError, InvalidRequestError, OpenTinkerError, ServerLostError, UnavailableError
from opentinker.server.engine.base import AdapterId
from opentinker.server.images import resolved
from opentinker.server.keeping import DRIVER, check_keep_last, driver_json, prune, read_driver, tags
from opentinker.server.memory import begin_peak, peak_memory_bytes
from opentinker.server.overlap import SWITCHING
from opentinker.server.policies import NAME
from opentinker.server.protocol import CommandWork
from opentinker.server.state import Hosted, State
from opentinker.server.sync import first_measure, publish, push, restore, serve
from opentinker.server.trainer.base import Trainer
from opentinker.server.trainer.checkpoint import recover_all, write_checkpoint
from opentinker.server.weights import checkpoint_weights
from opentinker.storage import all_checkpoints

log = logging.getLogger(__name__)


def execute(state: State, work: CommandWork) -> dict[str, Any]:
    """Run one command; its result as a wire tree.

    Raises:
        OpenTinkerError: the command's own error; anything else is a bug or a failing device.
    """
    if work.command not in ("create", "delete"):
        _ = state.parts.trainer  # raises where there is none
    with state.turn() if work.command in SWITCHING else nullcontext():
        return _COMMANDS[work.command](state, work.policy, work.args)


def _create(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    spec = validate(PolicySpec, args)
    state.check_room(policy, lora=spec.lora is not None)
    if state.parts.training is None:
        # The scheduler chose the folder: the front lets no client name one.
        folder = None if spec.checkpoint is None else _here(state, Path(spec.checkpoint))
        weights = None if folder is None else checkpoint_weights(state.parts.model_dir, folder)
        state.policies[policy] = serve(state.parts, weights)
        state.stale = weights is not None
        return {"policy": policy, "version": 0}
    trainer = state.parts.trainer
    trainer.create_policy(policy, spec)
    try:
        scores = not trainer.samples(policy)
        if state.stale and not scores:
            restore(state.parts, policy)
            state.stale = False
        state.policies[policy] = Hosted(0.0, [], {}, samples=False, kept=()) if scores else first_measure(state, policy)
        if spec.checkpoint is not None:
            trainer.load(policy, _here(state, Path(spec.checkpoint)), weights_only=True)
            if not scores:
                push(state, policy, 0)
    except Exception:
        state.policies.pop(policy, None)
        state.parts.engine.drop_adapter(AdapterId(policy, 0))
        state.stale = state.stale or not state.serves_adapter(policy)
        trainer.delete_policy(policy)
        raise
    state.first = state.first or policy
    return {"policy": policy, "version": 0}


def _delete(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    _known(args)
    kept = state.hosted(policy).kept
    state.drain(policy, kept)
    state.drop(policy, kept)
    if state.parts.training is not None:
        state.stale = state.stale or not state.serves_adapter(policy)
        state.parts.training.delete_policy(policy)
    del state.policies[policy]
    return {}


def _forward(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    _known(args, "data", "compute", "temperature")
    state.hosted(policy)
    compute = _compute(args.get("compute", ("logprobs",)))
    temperature = _number(args.get("temperature", 1.0), "temperature")
    if not temperature > 0:
        raise InvalidRequestError("temperature must be above 0")
    scores = state.parts.trainer.forward(policy, _data(state, args), compute=compute, temperature=temperature)
    return {name: scores[name] for name in compute}


def _forward_backward(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    _known(args, "data", "loss", "factor")
    state.hosted(policy)
    loss, factor = validate(LossConfig, args.get("loss")), _number(args.get("factor", 1.0), "factor")
    result = state.parts.trainer.forward_backward(policy, _data(state, args), loss, factor)
    name = "values" if loss.name in SCALAR_LOSSES else "logprobs"
    return {"loss": result.loss, "metrics": result.metrics, name: result.logprobs}


def _optim_step(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    state.hosted(policy)
    critic = _flag(args.get("critic", False), "critic")
    params = validate(AdamParams, {name: value for name, value in args.items() if name != "critic"})
    return dict(state.parts.trainer.optim_step(policy, params, critic=critic))


def _train_step(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    """Written with the small commands; nothing is trained unless everything is valid."""
    _known(args, "data", "minibatches", "loss", "optimizer", "critic", "publish")
    hosted = state.hosted(policy)
    data = _data(state, args)
    loss, optimizer = validate(LossConfig, args.get("loss")), validate(AdamParams, args.get("optimizer"))
    critic = None if args.get("critic") is None else validate(CriticStep, args["critic"])
    minibatches = _minibatches(args.get("minibatches"), len(data))
    will_publish = _flag(args.get("publish", True), "publish")
    trainer = state.parts.trainer
    trainer.check(policy, data, loss)
    if critic is not None:
        trainer.check(policy, data, critic.loss)
    for minibatch in minibatches if loss.name in PAIR_LOSSES else ():
        trainer.check(policy, [data[i] for i in minibatch.indices], loss)  # whether it keeps pairs together
    if will_publish:
        state.check_samples(policy)
    reports: list[dict[str, Any]] = []
    sleeper = state.parts.sleeper
    begin_peak()
    with nullcontext() if sleeper is None else sleeper.asleep():
        for minibatch in minibatches:
            try:
                part = [data[i] for i in minibatch.indices]
                report: dict[str, Any] = {}
                if critic is not None:  # first, so that no failure of it leaves the policy ahead
                    step = _trained(trainer, policy, part, critic.loss, minibatch.factor, critic.optimizer, critic=True)
                    report["critic"] = step
                if critic is None or not critic.alone:
                    report |= _trained(trainer, policy, part, loss, minibatch.factor, optimizer)
                reports.append(report)
            except OpenTinkerError as error:
                if len(minibatches) > 1 and not isinstance(error, ServerLostError):
                    done = f"minibatch {len(reports)} of {len(minibatches)}"
                    error.detail = f"{done}: {error.detail}; those before it were applied"
                raise
    memory_bytes = peak_memory_bytes()
    published = None
    if will_publish:
        with state.turn():
            published = publish(state, policy, "drain")
    return {"minibatches": reports, "version": hosted.version, "publish": published, "memory_bytes": memory_bytes}


def _trained(
    trainer: Trainer,
    policy: str,
    data: Sequence[Datum],
    loss: LossConfig,
    factor: float,
    optimizer: AdamParams,
    *,
    critic: bool = False,
) -> dict[str, Any]:
    """One optimizer step of the policy, or of its critic."""
    passed = trainer.forward_backward(policy, data, loss, factor)
    return {"loss": passed.loss, "metrics": passed.metrics, **trainer.optim_step(policy, optimizer, critic=critic)}


def _publish(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    _known(args, "mode")
    return publish(state, policy, str(args.get("mode", "drain")))


def _save(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    _known(args, "name", "driver", "keep_last")
    version, root = state.hosted(policy).version, state.checkpoint_root(policy)
    name, chosen = parse_name(args.get("name"))
    driver, keep_last = driver_json(args.get("driver")), check_keep_last(args.get("keep_last"))
    if chosen is not None:
        raise InvalidRequestError(f"'{args['name']}' is not a checkpoint name", hint="a save adds the version itself")
    folder = root / versioned(name, version)
    before = find(checkpoints(root), name)
    # The newest of a name is the one saved last, however the clock is set meanwhile.
    created_at = max(time.time(), before.created_at + 1e-3 if before else 0.0)
    about = {"name": name, "version": version, "created_at": created_at}
    beside = {} if driver is None else {DRIVER: driver}
    manifest = write_checkpoint(folder, lambda empty: state.parts.trainer.save(policy, empty, about, beside))
    storage = state.parts.storage
    if storage is not None:
        try:
            storage.put_folder(folder, last=MANIFEST)
        except UnavailableError as error:
            raise CheckpointError(
                f"the checkpoint {folder} is whole on this node, but was not copied: {error.detail}",
                hint="save it again when the storage is back",
            ) from error
    pruned = prune(root, name, keep_last, storage)
    return {"path": str(folder), "name": name, "version": version, "manifest": manifest, "pruned": pruned}


def _load(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    """Also publishes, so that the engine samples from what was loaded, unless nothing can be sampled. The checkpoint is one of
    this policy, or, in a `folder` that the front has found out, one of another job."""
    _known(args, "name", "folder")
    hosted = state.hosted(policy)
    if args.get("folder") is not None:
        path = Path(args["folder"])
        _, version = parse_folder(path.name) or ("", None)
    else:
        path, found = _named(state, policy, args.get("name"))
        version = None if found is None else found.version
    state.parts.trainer.load(policy, _here(state, path))
    driver = read_driver(path)
    if not hosted.samples:
        return {"version": hosted.version, "driver": driver}
    # A new server takes up the numbers where the checkpoint's left off, so that a version means the same weights for good.
    before = max(hosted.attempted, (version or 0) - 1)
    return {**publish(state, policy, "drain", after=before), "driver": driver}


def _load_weights(state: State, policy: str, args: dict[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint and nothing else of it, as the next version: one of this policy or of another of this server,
    or, in a `folder` that the front has found out, one that the job names."""
    _known(args, "name", "policy", "folder")
    hosted = state.hosted(policy)
    if args.get("folder") is not None:
        path = Path(args["folder"])
    else:
        source = args.get("policy") or policy
        if not isinstance(source, str) or not NAME.fullmatch(source):
            raise InvalidRequestError(f"{str(source)[:80]!r} is not the name of a policy")
        path, _ = _named(state, source, args.get("name"))
    state.parts.trainer.load(policy, _here(state, path), weights_only=True)
    if not hosted.samples:
        return {"version": hosted.version}
    return publish(state, policy, "drain")


def _named(state: State, policy: str, text: Any) -> tuple[Path, Checkpoint | None]:
    """The folder of a policy's checkpoint, and what is known of it if it is whole.

    Raises:
        CheckpointError: there is none.
    """
    name, version = parse_name(text)
    root = state.checkpoint_root(policy)
    recover_all(root)
    saved = _saved(state, root)
    found = resolve(saved, tags(root, state.parts.storage), name, version)
    path = root / versioned(name, version) if found is None else found.path
    if found is None and not path.is_dir():  # of one that is damaged, the trainer says what is wrong
        known = ", ".join(versioned(c.name, c.version) for c in saved[:10])
        raise CheckpointError(
            f"there is no checkpoint '{versioned(name, version)}' of this policy",
            hint=f"there are: {known}" if known else "none was saved yet",
        )
    return path, found


def _saved(state: State, root: Path) -> list[Checkpoint]:
    """The policy's checkpoints, newest first; when the storage is away, those of this node."""
    try:
        return all_checkpoints(root, state.parts.storage)
    except UnavailableError as error:
        log.warning("event=storage_away error=%s", error)
        return checkpoints(root)


def _here(state: State, folder: Path) -> Path:
    """The folder of a checkpoint, brought here from the storage if this node has it not."""
    storage = state.parts.storage
    if storage is not None and storage.covers(folder) and not folder.is_dir():
        storage.fetch_folder(folder, last=MANIFEST)
    return folder


_COMMANDS: dict[str, Callable[[State, str, dict[str, Any]], dict[str, Any]]] = {
    "create": _create,
    "delete": _delete,
    "forward": _forward,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "train_step": _train_step,
    "publish": _publish,
    "save": _save,
    "load": _load,
    "load_weights": _load_weights,
}


def _known(args: dict[str, Any], *names: str) -> None:
    for name in args:
        if name not in names:
            raise InvalidRequestError(f"unknown argument '{name}'", hint=nearest(str(name), names) if names else "")


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequestError(f"{what} must be a finite number")
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{what} must be true or false")
    return value


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidRequestError(f"{what} must be a list that is not empty")
    return value


def _data(state: State, args: dict[str, Any]) -> list[Datum]:
    data = [_datum(index, body) for index, body in enumerate(_list(args.get("data"), "data"))]
    return [replace(datum, chunks=resolved(state.parts.images, datum.chunks)) for datum in data]


def _datum(index: int, body: Any) -> Datum:
    try:
        return Datum.from_wire(body)
    except InvalidRequestError as error:
        error.detail = f"datum {index}: {error.detail}"
        raise


def _compute(value: Any) -> tuple[TokenScore, ...]:
    """What a `forward` is asked for, each once."""
    asked = _list(value, "compute")
    for name in asked:
        if not isinstance(name, str) or name not in TOKEN_SCORES:
            raise InvalidRequestError(
                f"compute: there is no '{name}'; nothing was computed", hint=nearest(str(name), TOKEN_SCORES)
            )
    return tuple(name for name in TOKEN_SCORES if name in asked)


def _minibatches(value: Any, data_count: int) -> list[Minibatch]:
    minibatches = [validate(Minibatch, body) for body in _list(value, "minibatches")]
    for number, minibatch in enumerate(minibatches):
        _number(minibatch.factor, f"the factor of minibatch {number}")
        _list(minibatch.indices, f"the indices of minibatch {number}")
        outside = [i for i in minibatch.indices if not 0 <= i < data_count]
        if outside:
            raise InvalidRequestError(
                f"minibatch {number} has index {outside[0]}, but there are {data_count} data; nothing was trained"
            )
    return minibatches
