"""Linters and schemas accept what scripts/deploy has, and the launch scripts and the server its commands."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lopa_ascend.backend.npu.versions import cann_of, check_versions
from lopa_ascend.config import GRAPH_MODES_BY_DEVICE
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.serve.cli import config_of, parse_args
from lopa_ascend.serve.config import ServeConfig
from scripts.launch.npu import CONTROL_DEVICES, DIES
from tests.launch_scripts import ROOT, Scripts

FOLDER = ROOT / "scripts/deploy"
DOCKERFILES = ("cpu", "cuda", "ascend")
MANIFESTS = ("leaderworkerset", "rayservice")
SCHEMAS = ROOT / "tests/data"
"""Has the schemas of the custom resources, as published but for descriptions. Pod templates are checked as pods."""
YAMLLINT = "{extends: default, rules: {line-length: {max: 120}, document-start: disable}}"


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def run_tool(name: str, *arguments: str) -> None:
    """Runs a linter, which must find nothing."""
    tool = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if tool is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([tool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text("utf-8")))


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, each on one line."""
    text = (FOLDER / f"{name}.Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(instruction, rest) for instruction, _, rest in (line.partition(" ") for line in lines)]


def build_arguments(name: str) -> dict[str, str]:
    given = (rest.partition("=") for instruction, rest in instructions(name) if instruction == "ARG")
    return {argument: default for argument, _, default in given}


def pod_templates(node: object) -> Iterator[dict[str, Any]]:
    """The pod templates anywhere in a manifest."""
    if isinstance(node, dict):
        if isinstance(node.get("spec"), dict) and "containers" in node["spec"]:
            yield node
        for value in node.values():
            yield from pod_templates(value)
    elif isinstance(node, list):
        for entry in node:
            yield from pod_templates(entry)


def containers(name: str) -> list[dict[str, Any]]:
    return [container for pod in pod_templates(read(name)) for container in pod["spec"]["containers"]]


def server_of(command: list[str], scripts: Scripts) -> ServeConfig:
    """What the server's parser makes of a container's command, after the launch script's own checks."""
    script = Path(command[0])
    if script.suffix == ".sh":
        assert script.parent == Path("scripts/launch")
        ((_, command),) = scripts.dry_run(script.stem, *command[1:])
        command = ["python", *command]
    arguments = command[command.index("lopa_ascend.serve") + 1 :]
    # The model of the container is not on this machine.
    return parse_args([str(DEMO_MODEL) if argument.startswith("/models/") else argument for argument in arguments])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_no_objections(name: str):
    run_tool("hadolint", f"{name}.Dockerfile")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_copied_path_is_in_the_repository(name: str):
    """An image is built from `git archive`, which has nothing else."""
    sources = [source for what, rest in instructions(name) if what == "COPY" for source in rest.split()[:-1]]
    assert {"setup.py", "lopa_ascend", "scripts"} <= set(sources)
    assert ("tests" in sources) == (name != "cpu"), "the self-test of a device takes its cases from there"
    for source in sources:
        assert subprocess.check_output(["git", "ls-files", source], cwd=ROOT), source


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_command_of_an_image_is_one_that_the_server_takes(name: str, scripts: Scripts):
    (command,) = [json.loads(rest) for instruction, rest in instructions(name) if instruction == "CMD"]
    assert server_of(command, scripts).host == "0.0.0.0"


def test_the_images_have_versions_that_go_together():
    wanted = re.findall(
        r'^TORCH="\$\{TORCH:-torch==(.+)\}"$', (ROOT / "scripts/env.sh").read_text("utf-8"), re.MULTILINE
    )
    assert [build_arguments("cpu")["TORCH"]] == [build_arguments("cuda")["TORCH"]] == wanted
    given = build_arguments("ascend")
    for mode in GRAPH_MODES_BY_DEVICE["npu"]:
        check_versions(given["TORCH"], given["TORCH_NPU"], mode)
    cann = given["CANN_IMAGE"].partition(":")[2].partition("-")[0]
    assert cann_of(given["TORCH_NPU"]) == cann
    versions = {
        given["RAY"],
        build_arguments("cpu")["RAY"],
        build_arguments("cuda")["RAY"],
        read("rayservice")[-1]["spec"]["rayClusterConfig"]["rayVersion"],
    }
    assert len(versions) == 1


@pytest.mark.parametrize("name", ["compose", "cpu", *MANIFESTS])
def test_yamllint_has_no_objections(name: str):
    run_tool("yamllint", "--strict", "-d", YAMLLINT, f"{name}.yaml")


def test_the_compose_file_follows_its_schema():
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifests_follow_the_schemas_of_kubernetes(name: str):
    kubernetes = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    version = kubernetes.latest_version()
    documents = read(name)
    *objects, custom = documents
    for document in [*objects, *read("cpu")]:
        kubernetes.validate(document, version, strict=True)
    jsonschema.validate(custom, json.loads((SCHEMAS / f"{name}.json").read_text("utf-8")))
    pods = list(pod_templates(custom))
    assert len(pods) == 2
    for pod in pods:
        kubernetes.validate({"apiVersion": "v1", "kind": "Pod", **pod}, version, strict=True)


def test_the_cpu_image_needs_no_root_and_writes_to_its_temporary_directory_alone():
    """tests/e2e/test_installed.py runs a server so."""
    user = next(rest for instruction, rest in reversed(instructions("cpu")) if instruction == "USER")
    assert int(user) > 0  # a number, without which Kubernetes does not know that it is not root
    assert ("ENV", "HOME=/tmp") in instructions("cpu")
    service = read("compose")[0]["services"]["cpu"]
    assert service["read_only"]
    assert service["tmpfs"] == ["/tmp:exec"]
    assert "volumes" not in service
    (pod,) = pod_templates(read("cpu"))
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert pod["spec"]["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert container["image"] == service["image"]


def test_the_set_launches_one_server_on_its_nodes(scripts: Scripts):
    nodes = read("leaderworkerset")[-1]["spec"]["leaderWorkerTemplate"]["size"]
    given = {"LWS_GROUP_SIZE": str(nodes), "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "lopa-0.lopa.default"}
    for container in containers("leaderworkerset"):
        command = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], argument) for argument in container["args"]]
        engine = server_of(command, scripts).engine
        dies = container["resources"]["limits"]["huawei.com/Ascend910"] * nodes
        assert engine.tensor_parallel_size * engine.branch_parallel_size == dies


def test_the_service_has_a_node_for_each_engine(scripts: Scripts):
    spec = read("rayservice")[-1]["spec"]
    deployed = yaml.safe_load(spec["serveConfigV2"])
    (application,), (workers,) = deployed["applications"], spec["rayClusterConfig"]["workerGroupSpecs"]
    config = config_of({**application["args"], "model": str(DEMO_MODEL)}, "serveConfigV2")
    (container,) = workers["template"]["spec"]["containers"]
    engine = config.engine
    assert engine.tensor_parallel_size * engine.branch_parallel_size == DIES
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == DIES
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == {"NPU": DIES}
    assert config.replicas == workers["replicas"]
    assert container["volumeMounts"][1]["mountPath"] == str(Path(application["args"]["model"]).parent)
    ((launched, _),) = scripts.dry_run("cluster", "--node-rank=0", "--master-addr=lopa", "--interface=eth0")
    # Ray and the replica set these for each rank.
    del launched["ASCEND_RT_VISIBLE_DEVICES"], launched["HCCL_IF_BASE_PORT"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    launched.pop("LD_PRELOAD", None)
    assert given == {**launched, "CPU_AFFINITY_CONF": "0", "LOPA_API_KEY": None}


def test_the_compose_file_starts_servers(scripts: Scripts):
    services = read("compose")[0]["services"]
    assert set(services) == set(DOCKERFILES)
    engine = server_of(services["ascend"]["command"], scripts).engine
    assert engine.tensor_parallel_size * engine.branch_parallel_size == DIES


def test_every_way_to_start_a_container_gives_it_the_gpus(scripts: Scripts):
    """Those of docs/cuda.md and of the compose file; NCCL's ranks on a machine share its memory."""
    service = read("compose")[0]["services"]["cuda"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["capabilities"], devices["count"], service["ipc"]) == (["gpu"], "all", "host")
    assert server_of(service["command"], scripts).engine.device == "cuda"
    (line,) = re.findall(r"^docker run .*$", (ROOT / "docs/cuda.md").read_text("utf-8"), re.MULTILINE)
    words = line.split()
    assert {"--gpus", "all", "--ipc=host"} < set(words)
    assert server_of(words[words.index(service["image"]) + 1 :], scripts).engine.device == "cuda"


def test_every_way_to_start_a_container_gives_it_the_dies_and_the_files_of_the_driver(scripts: Scripts):
    """The `docker run` of docs/deploy.md, as a shell reads it, against the compose file."""
    ascend = read("compose")[0]["services"]["ascend"]
    assert ascend["devices"] == [f"/dev/davinci{die}" for die in range(DIES)] + [f"/dev/{x}" for x in CONTROL_DEVICES]
    text = (ROOT / "docs/deploy.md").read_text("utf-8")
    (block,) = re.findall(r"^```bash\n([^`]*\bdocker run\b[^`]*?--device[^`]*)^```$", text, re.MULTILINE)
    shell = f'docker() {{ [[ $1 != run ]] || printf "%s\\n" "$@"; }}\n{block}'
    words = subprocess.check_output(["bash", "-euc", shell], text=True, timeout=60, cwd=ROOT).splitlines()
    pairs = list(itertools.pairwise(words))
    assert [value for flag, value in pairs if flag == "--device"] == ascend["devices"]
    *mounted, models = [value for flag, value in pairs if flag == "-v"]
    assert [*mounted, "${MODELS:-/models}:/models:ro"] == ascend["volumes"]
    assert models.endswith(":/models:ro")
    server_of(words[words.index(ascend["image"]) + 1 :], scripts)
