"""What is started for an engine of the run: one server, several behind a router, or a frozen model's.

1. Flags: SGLang's of the run (rollout.engine_args), over them those of the server group, over them GPUs and role.
2. What cannot be started here is told before anything is.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from strawflow.config import RolloutSection, RunConfig
from strawflow.errors import ConfigError
from strawflow.flow.session import WorkerSession
from strawflow.index.slots import Slot
from strawflow.topology import EnginePlan, Placement, Topology, as_arguments, placements
from strawflow_workers.rollout.engine_process import EngineProcess, FakeEngineProcess
from strawflow_workers.rollout.routed_engines import Member, RoutedClient, RoutedEngines
from strawflow_workers.rollout.sglang_client import Patience, SglangClient
from strawflow_workers.rollout.sglang_server import SglangOptions, SglangServer, free_port

ALONE = EnginePlan("regular", (), 0, 0)
"""A server by the run's own flags, on whatever GPUs SGLang takes by itself."""


@dataclass(frozen=True)
class _Files:
    """What a server serves."""

    model_path: Path
    log_path: Path
    version_id: str | None
    load_tokenizer: bool
    arguments: tuple[str, ...]


def require_startable(config: RunConfig) -> None:
    """Refuse a topology that cannot be started on this host.

    Raises:
        ConfigError: says what is missing.
    """
    topology = config.rollout.topology
    if not isinstance(topology, Topology):
        return
    for placement in placements(topology):
        if placement.is_routed and importlib.util.find_spec("sglang_router") is None:
            raise ConfigError(
                f"rollout.topology: model {placement.model}: its engines stand behind a router, and sglang_router is not "
                "installed; install it with pip install sglang-router"
            )
        kinds = {engine.worker_type for engine in placement.engines}
        on_cuda = SglangOptions(model_path=Path(), log_path=Path()).resolved_device() == "cuda"
        if "prefill" in kinds and config.rollout.engine == "sglang" and not on_cuda:
            raise ConfigError(
                f"rollout.topology: model {placement.model}: prefill and decode servers hand the KV cache on between GPUs, and "
                "this host has no NVIDIA driver; use worker_type regular"
            )
        if placement.path and not (Path(placement.path) / "config.json").exists():
            raise ConfigError(
                f"rollout.topology: model {placement.model}: path: {placement.path} is no Hugging Face checkpoint folder on this "
                "host: it has no config.json"
            )


def placement_of(config: RunConfig, slot: Slot) -> Placement:
    """Return what is to be started for an engine of the run."""
    topology = config.rollout.topology
    if slot.placement is None or not isinstance(topology, Topology):
        return Placement(slot.model, "", (ALONE,))
    return placements(topology)[slot.placement]


def policy_process(session: WorkerSession, slot: Slot, model_path: Path, *, version_id: str) -> EngineProcess:
    """Return the (not yet started) engine that serves the run's own weights."""
    config = session.run.config.rollout
    # Weights are stored without a tokenizer; only an engine that looks for texts or counts tokens up needs one.
    needs_text = bool(config.stop or config.min_response_tokens)
    of_tokenizer = ("--tokenizer-path", str(session.run.model_path)) if needs_text else ()
    streaming = ("--incremental-streaming-output", "--stream-interval", str(config.stream_interval))
    arguments = (*of_tokenizer, *(streaming if config.saves_progress else ()), *config.engine_args)
    files = _Files(model_path, _log_path(session), version_id, needs_text, arguments)
    placement = placement_of(session.run.config, slot)
    if not placement.is_routed:
        return _server(session, placement.engines[0], files, bootstrap_port=0)
    members = []
    for number, plan in enumerate(placement.engines):
        own_log = replace(files, log_path=_log_path(session, f"engine-{number}"))
        bootstrap_port = free_port("127.0.0.1") if plan.worker_type == "prefill" else 0
        process = _server(session, plan, own_log, bootstrap_port=bootstrap_port)
        members.append(Member(process, plan.worker_type, bootstrap_port))
    flags = dict(config.topology.router) if isinstance(config.topology, Topology) else {}
    arguments = (*config.router_args, *as_arguments(flags))
    return RoutedEngines(members, arguments=arguments, log_path=_log_path(session, "router"))


def frozen_process(session: WorkerSession, slot: Slot) -> EngineProcess:
    """Return the (not yet started) engine that serves a frozen model."""
    placement = placement_of(session.run.config, slot)
    files = _Files(Path(placement.path), _log_path(session), None, True, ())
    return _server(session, placement.engines[0], files, bootstrap_port=0)


def make_client(process: EngineProcess, *, max_connections: int, patience: Patience) -> SglangClient:
    """Return the client of a started engine."""
    if isinstance(process, RoutedEngines):
        return RoutedClient(
            process.url, process.member_urls, max_connections=max_connections, patience=patience
        )
    return SglangClient(process.url, max_connections=max_connections, patience=patience)


def _server(session: WorkerSession, plan: EnginePlan, files: _Files, *, bootstrap_port: int) -> EngineProcess:
    config = session.run.config.rollout
    if config.engine == "fake":
        return FakeEngineProcess(
            files.model_path,
            files.log_path,
            version_id=files.version_id or "frozen",
            options=_fake_options(config) if files.version_id else {},
            port=plan.port,
        )
    options = SglangOptions(
        model_path=files.model_path,
        log_path=files.log_path,
        weight_version=files.version_id,
        load_tokenizer=files.load_tokenizer,
        port=plan.port,
    )
    of_plan = (*_gpus(plan, options), *_role(plan, bootstrap_port), *plan.arguments)
    return SglangServer(replace(options, extra_args=(*files.arguments, *of_plan)))


def _fake_options(config: RolloutSection) -> dict[str, str]:
    return {"stream-interval": str(config.stream_interval), **config.engine_options}


def _gpus(plan: EnginePlan, options: SglangOptions) -> tuple[str, ...]:
    if not plan.num_gpus or options.resolved_device() == "cpu":
        return ()
    return ("--base-gpu-id", str(plan.first_gpu), "--tp-size", str(plan.num_gpus))


def _role(plan: EnginePlan, bootstrap_port: int) -> tuple[str, ...]:
    match plan.worker_type:
        case "prefill":
            return (
                "--disaggregation-mode",
                "prefill",
                "--disaggregation-bootstrap-port",
                str(bootstrap_port),
            )
        case "decode":
            return ("--disaggregation-mode", "decode")
        case _:
            return ()


def _log_path(session: WorkerSession, what: str = "engine") -> Path:
    path = session.run.root / "logs" / f"{what}-{session.session_id}.log"
    path.parent.mkdir(exist_ok=True)
    return path
