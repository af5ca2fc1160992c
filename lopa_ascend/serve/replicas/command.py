"""The command with --replicas: brings up a local cluster, or joins one, and serves until a signal comes."""

from __future__ import annotations

import os
import signal
import sys
import threading

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.replicas.app import APP, application, node_resources, placements
from lopa_ascend.serve.replicas.placement import check_room
from lopa_ascend.serve.server import bind, check_tls

OBJECT_STORE = 2**28
"""Bytes of the local cluster's object store. Messages are small, and few go through it."""


def run(config: ServeConfig) -> int:
    """Serves until SIGINT or SIGTERM. Returns 1 if it could not start."""
    try:
        listener = bind(config)  # before anything is started, so that a port in use shows at once
        check_tls(config)
        _connect()
        nodes = node_resources(config.engine.device)
        check_room(placements([config], nodes), nodes)
        app = application([config])
    except (ValueError, OSError, ConnectionError) as error:
        return _refused(str(error))
    host, port = listener.getsockname()[:2]
    listener.close()
    try:
        serve.start(proxy_location="HeadOnly", http_options=_http_options(config, host, port))
        serve.run(app, name=APP)
    except RuntimeError as error:
        return _refused(failure(str(error)))
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    ranks = config.engine.world_size
    sys.stdout.write(
        f"\nreplicas  {config.replicas} of {ranks} rank(s)\nserving   {url}  (API documentation: {url}/docs)\n"
    )
    sys.stdout.flush()
    stopped.wait()
    _end(config.shutdown_timeout)
    return 0


def _connect() -> None:
    """Joins the cluster of RAY_ADDRESS, or starts a local one, which ends with this process."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(logging_level="warning")
        return
    ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, logging_level="warning")


def _http_options(config: ServeConfig, host: str, port: int) -> HTTPOptions:
    return HTTPOptions(
        host=host,
        port=port,
        root_path=config.root_path,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        ssl_ca_certs=config.ssl_ca_certs,
    )


def _end(timeout: float) -> None:
    """Lets replicas end what they have, and takes the application from the cluster."""
    if "RAY_ADDRESS" in os.environ:
        serve.delete(APP, _blocking=False)
    elif timeout:
        deletion = threading.Thread(target=serve.delete, args=(APP,), daemon=True)
        deletion.start()
        deletion.join(timeout)
    ray.shutdown()


def failure(message: str) -> str:
    """What a replica that could not start has said, by the deployment's traceback; else Ray's ``message``."""
    app = serve.status().applications.get(APP)
    texts = [message, *(deployment.message for deployment in (app.deployments.values() if app else ()))]
    said = [line.partition("EngineFailed: ")[2] for text in texts for line in text.splitlines()]
    return next(filter(None, said), message)


def _refused(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1
