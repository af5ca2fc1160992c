"""The application on Ray Serve: an ingress, and a deployment for each model."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter

from lopa_ascend.backend import find_device
from lopa_ascend.config import ParameterError
from lopa_ascend.hub import model_name
from lopa_ascend.serve.api.request import check_defaults
from lopa_ascend.serve.app import create_app
from lopa_ascend.serve.cli import config_of
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.http.connections import connection_limit
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.replicas.placement import ReplicaPlacement, actor_options, place
from lopa_ascend.serve.replicas.replica import Replica
from lopa_ascend.serve.replicas.router import FewestTokens
from lopa_ascend.serve.replicas.transport import Replicas
from lopa_ascend.serve.server import chat_template

APP = "lopa"
HEAD = "node:__internal_head__"
"""A resource of the head node alone."""
DRAIN_TIME = 3600.0
"""Most seconds that a replica which is scaled down or replaced goes on with what it has."""
UPSCALE_DELAY, DOWNSCALE_DELAY = 10.0, 600.0
"""Seconds that a queue, or idleness, must last before replicas come or go: one loads for seconds to minutes."""
START_ATTEMPTS = 2
"""Starts of a replica that may fail before the deployment fails."""
STATS_PERIOD = 1.0


@serve.ingress()
class Ingress:
    """The HTTP application, whose engines are deployments. The first model's settings of HTTP hold for all; ``address``
    is the numeric one of Serve's proxies."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        configs: Sequence[ServeConfig],
        templates: Sequence[str | None],
        address: str,
        *handles: DeploymentHandle,
    ):
        self._address, self._clients = address, []
        for config, template, handle in zip(configs, templates, handles, strict=True):
            replicas, ready = await Replicas.connect(handle)
            client = await EngineClient.connect(replicas, ready, config, template)
            check_defaults(config.decoding, client.prompts, ready.limits)
            self._clients.append(client)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._clients, self._address)


def node_resources(device: str) -> list[float]:
    """How much of a device's resource each node has."""
    resource = find_device(device).resource
    return [node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"]]


def application(configs: Sequence[ServeConfig], router: type[RequestRouter] = FewestTokens) -> serve.Application:
    """The application for these models; Ray must be connected. ``router`` chooses the replica of each choice. Raises
    ParameterError if a model cannot be placed, or two have one name; ValueError or OSError for a chat template."""
    names = [_name(config) for config in configs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ParameterError("served_model_name", f"{sorted(twice)[0]!r} is the name of two models")
    # Secrets stay with the ingress.
    engines = [
        _deployment(name, replace(config, api_key=None, ssl_keyfile_password=None), router)
        for name, config in zip(names, configs, strict=True)
    ]
    first = configs[0]
    address = str(socket.getaddrinfo(first.host, None)[0][4][0])
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        # Beside the proxy and what knows the cluster, without which nothing is answered anyway: so that no other node
        # takes answers along. A configuration file may set another place and number.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        max_ongoing_requests=connection_limit(first.max_num_queued_reqs),
        graceful_shutdown_timeout_s=DRAIN_TIME,
        health_check_period_s=1.0,
        max_constructor_retry_count=START_ATTEMPTS,
    )
    return ingress.bind(configs, [chat_template(config) for config in configs], address, *engines)


def build(args: Mapping[str, Any]) -> serve.Application:
    """The builder for `serve run` and Serve's configuration files. ``args`` is as the file of --config; ``models`` is a
    list of such mappings, which override what stands beside it."""
    common = dict(args)
    models = common.pop("models", [{}])
    configs = [config_of({**common, **model}, f"models[{index}]") for index, model in enumerate(models)]
    return application([replace(config, replicas=config.replicas or 1) for config in configs])


def _name(config: ServeConfig) -> str:
    name = config.served_model_name or model_name(config.engine)
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def _deployment(name: str, config: ServeConfig, router: type[RequestRouter]) -> serve.Application:
    nodes, needs = node_resources(config.engine.device), find_device(config.engine.device).rank_needs(config.engine)
    if max(nodes, default=0) < config.engine.tensor_parallel_size * needs:
        nodes = [math.inf]  # nodes that are still to come should hold a replica each; Serve waits for them, and says so
    placement = place(config.engine, nodes)
    seqs = config.engine.max_num_seqs
    routing = RequestRouterConfig(request_router_class=router, request_routing_stats_period_s=STATS_PERIOD)
    deployment = serve.deployment(
        Replica,
        name=name,
        ray_actor_options=actor_options(config.engine),
        max_ongoing_requests=2 * seqs,  # a batch, and the next one
        request_router_config=routing,
        graceful_shutdown_timeout_s=DRAIN_TIME,
        health_check_period_s=1.0,
        max_constructor_retry_count=START_ATTEMPTS,
        **_number(config, seqs),
        **placement.options(),
    )
    return deployment.bind(config, placement)


def _number(config: ServeConfig, seqs: int) -> dict[str, Any]:
    """More replicas while choices wait for a batch, up to ``max_replicas``."""
    assert config.replicas is not None
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    scaling = AutoscalingConfig(
        min_replicas=config.replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=seqs,
        upscale_delay_s=UPSCALE_DELAY,
        downscale_delay_s=DOWNSCALE_DELAY,
    )
    return {"autoscaling_config": scaling}


def placements(configs: Sequence[ServeConfig], nodes: Sequence[float]) -> list[tuple[ReplicaPlacement, int]]:
    """How the replicas of each model are placed, and how many there are at least."""
    return [(place(config.engine, nodes), config.replicas or 1) for config in configs]
