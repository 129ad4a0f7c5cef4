"""The manifests: valid by Kubernetes' own schemas, and what they promise of probes, drains and rights."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml
from support.deployment import DEPLOY, configuration, documents, kubernetes_documents, of_kind

from pageturner.service.config import load_config
from pageturner.service.rpc.health import LIVENESS

KUBERNETES = DEPLOY / "kubernetes"
VERSION = "1.34"
OVERLAYS = ("base", "secured", "apart")


@pytest.mark.parametrize(("file", "document"), list(kubernetes_documents()))
def test_each_object_is_valid(file: str, document: Any) -> None:
    kubernetes_validate.utils.validate(document, VERSION, strict=True)


@pytest.fixture(scope="module", params=OVERLAYS)
def built(request: pytest.FixtureRequest) -> list[Any]:
    """All that `kubectl apply -k` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, which builds the overlays")
    command = [kubectl, "kustomize", str(KUBERNETES / request.param)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(output))


def test_an_overlay_builds_into_valid_objects_of_one_namespace(built: list[Any]) -> None:
    for document in built:
        kubernetes_validate.utils.validate(document, VERSION, strict=True)
        assert document["metadata"].get("namespace", "pageturner") == "pageturner"
    (deployment,) = [document for document in built if document["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert len({"grpc", "httpGet", "exec", "tcpSocket"} & container[name].keys()) == 1, name


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    (deployment,) = of_kind("Deployment")
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def test_a_pod_meets_the_restricted_standard(pod: dict[str, Any]) -> None:
    (namespace,) = of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_probes_ask_health_by_grpc_where_the_server_listens(pod: dict[str, Any], tmp_path: Path) -> None:
    (container,) = pod["containers"]
    config = configuration(KUBERNETES / "base" / "pageturner.toml", tmp_path).config
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.server.port, "metrics": config.metrics.port}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["grpc"]["port"] == config.server.port, name
    ready, live = container["readinessProbe"], container["livenessProbe"]
    assert "service" not in ready["grpc"]
    assert live["grpc"]["service"] == LIVENESS
    patience = [probe["periodSeconds"] * probe["failureThreshold"] for probe in (ready, live)]
    assert patience[0] < patience[1], "it is taken out of the balance before it is restarted"


def test_a_pod_that_goes_has_time_for_its_hook_and_its_drain(pod: dict[str, Any], tmp_path: Path) -> None:
    (container,) = pod["containers"]
    hook = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    for overlay in OVERLAYS:
        server = configuration(KUBERNETES / overlay / "pageturner.toml", tmp_path).config.server
        assert pod["terminationGracePeriodSeconds"] > hook + server.drain_seconds + server.abort_seconds


def test_what_the_server_writes_lies_on_volumes(pod: dict[str, Any], tmp_path: Path) -> None:
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert "/var/cache/pageturner" in mounts
    for overlay in OVERLAYS:
        admin = configuration(KUBERNETES / overlay / "pageturner.toml", tmp_path).config.server.admin_address
        assert admin is not None
        assert admin.host.removeprefix("unix:").rpartition("/")[0] in mounts
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()


def test_the_secured_configuration_names_mounted_secrets(tmp_path: Path) -> None:
    config = configuration(KUBERNETES / "secured" / "pageturner.toml", tmp_path).config
    (patch,) = documents(KUBERNETES / "secured" / "certificates.yaml")
    spec = patch["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    secrets = {mounts[volume["name"]]: volume["secret"]["secretName"] for volume in spec["volumes"]}
    held = {secret["metadata"]["name"]: secret.get("stringData", {}).keys() for secret in of_kind("Secret")}
    named = [config.tls.certificate, config.tls.key, config.auth.identities]
    for path in named:
        assert path is not None
        assert path.name in held[secrets[str(path.parent)]]


def test_prefill_and_decode_are_apart_and_know_each_other(pod: dict[str, Any], tmp_path: Path) -> None:
    (prefill,) = of_kind("StatefulSet")
    spec, apart = prefill["spec"], KUBERNETES / "apart"
    name, service = prefill["metadata"]["name"], spec["serviceName"]
    assert service in [one["metadata"]["name"] for one in of_kind("Service")]
    decode = configuration(apart / "pageturner.toml", tmp_path).config.handover
    assert decode.role == "decode"
    expected = [f"{name}-{number}.{service}:50051" for number in range(spec["replicas"])]
    assert list(decode.prefill_targets) == expected
    assert configuration(apart / "prefill.toml", tmp_path).config.handover.role == "prefill"
    theirs = spec["template"]["spec"]
    assert theirs["securityContext"] == pod["securityContext"]
    (container,), (other,) = theirs["containers"], pod["containers"]
    for part in (
        "image",
        "args",
        "startupProbe",
        "livenessProbe",
        "securityContext",
        "volumeMounts",
        "lifecycle",
    ):
        assert container[part] == other[part], part
    labels = spec["template"]["metadata"]["labels"]
    (deployment,) = of_kind("Deployment")
    assert labels != deployment["spec"]["template"]["metadata"]["labels"], "else clients would be sent there"


def test_the_autoscaler_and_the_budget_mean_the_deployment() -> None:
    (deployment,), (scaler,), (budget,) = map(
        of_kind, ("Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget")
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert scaler["spec"]["minReplicas"] > budget["spec"]["maxUnavailable"], "one is always left"
    assert "replicas" not in deployment["spec"], "each apply would undo what the autoscaler said"


def _service_variables() -> Iterator[tuple[str, dict[str, str]]]:
    """What a kubelet would set in each pod of the namespace for each Service of the manifests, and for others
    that people name for what they are."""
    services = [(one["metadata"]["name"], one["spec"]["ports"]) for one in of_kind("Service")]
    words = ("server", "metrics", "cache", "tls")
    services += [(f"pageturner-{word}", [{"name": "http", "port": 80}]) for word in words]
    for name, ports in services:
        stem, address = re.sub(r"\W", "_", name).upper(), "10.0.0.9"
        told = {f"{stem}_SERVICE_HOST": address, f"{stem}_SERVICE_PORT": str(ports[0]["port"])}
        told[f"{stem}_PORT"] = f"tcp://{address}:{ports[0]['port']}"
        for port in ports:
            told[f"{stem}_SERVICE_PORT_{port['name'].upper()}"] = str(port["port"])
            link = f"{stem}_PORT_{port['port']}_TCP"
            told |= {link: f"tcp://{address}:{port['port']}", f"{link}_PROTO": "tcp"}
            told |= {f"{link}_PORT": str(port["port"]), f"{link}_ADDR": address}
        yield name, told


@pytest.mark.parametrize(("name", "variables"), list(_service_variables()))
def test_variables_of_a_service_configure_nothing(name: str, variables: dict[str, str]) -> None:
    assert load_config(None, variables).origins == {}
