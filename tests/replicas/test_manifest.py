"""Ray Serve takes what the manifest for KubeRay has for it."""

import importlib

import pytest
import yaml

from tests.launch_scripts import ROOT

schema = pytest.importorskip("ray.serve.schema", reason="the extra ray is not installed")


def test_serve_takes_the_configuration_of_the_manifest():
    *_, service = yaml.safe_load_all((ROOT / "scripts/deploy/rayservice.yaml").read_text("utf-8"))
    deployed = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = deployed.applications
    module, _, builder = application.import_path.partition(":")
    app = importlib.import_module(module)
    assert callable(getattr(app, builder))
    assert [deployment.name for deployment in application.deployments] == [app.Ingress.__name__]
