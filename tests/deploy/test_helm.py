"""The chart is rendered, also without helm: its templates hold nothing but values, and their manifests fit together."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
VALUE = re.compile(r"\{\{ \.(Values(?:\.\w+)+|Release\.Namespace) \}\}")


def rendered(values=None):
    """The manifests, each as a dict. What is no plain value in a template is an error, and so is an unknown value."""
    values = values or yaml.safe_load((CHART / "values.yaml").read_text())
    asked = set()

    def value(found):
        names = found[1].split(".")
        if names == ["Release", "Namespace"]:
            return "fleet-space"
        asked.add(".".join(names[1:]))
        here = values
        for name in names[1:]:
            here = here[name]
        assert not isinstance(here, dict | list | type(None))
        return str(here)

    texts = []
    for file in sorted((CHART / "templates").iterdir()):
        text = VALUE.sub(value, file.read_text())
        assert "{{" not in text, file
        texts.append(text)
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)], asked


@pytest.fixture(scope="module")
def manifests():
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in rendered()[0]}


@pytest.fixture(scope="module")
def pods(manifests):
    kinds = {("StatefulSet", "superlink"), ("Deployment", "gate")}
    return {name: manifests[kind, name]["spec"]["template"] for kind, name in kinds}


def flat(values, before=""):
    for name, value in values.items():
        yield from flat(value, f"{before}{name}.") if isinstance(value, dict) else [before + name]


def test_every_value_is_used():
    assert rendered()[1] == set(flat(yaml.safe_load((CHART / "values.yaml").read_text())))


if shutil.which("helm"):  # elsewhere the renderer of these tests stands for it

    def test_helm_renders_the_same(manifests):
        subprocess.run(["helm", "lint", CHART], check=True)
        command = ["helm", "template", "wildflower", CHART, "--namespace", "fleet-space"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        by_helm = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
        assert {(m["kind"], m["metadata"]["name"]): m for m in by_helm} == manifests


def test_the_superlink_is_that_of_compose(pods):
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    [superlink] = [c for c in pods["superlink"]["spec"]["containers"] if c["name"] == "superlink"]
    assert superlink["command"] == compose["services"]["superlink"]["command"]
    [bandwidth] = [c for c in pods["gate"]["spec"]["containers"] if c["name"] == "bandwidth"]
    assert bandwidth["command"] == compose["services"]["bandwidth"]["command"]


def test_nobody_but_the_gate_reaches_the_superlink(manifests, pods):
    policy = manifests["NetworkPolicy", "superlink"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods["superlink"]["metadata"]["labels"].items()
    [rule] = policy["ingress"]
    [who] = rule["from"]
    assert who["podSelector"]["matchLabels"].items() <= pods["gate"]["metadata"]["labels"].items()
    assert manifests["Service", "superlink"]["spec"].get("type", "ClusterIP") == "ClusterIP"
    for name in pods:
        labels = manifests["Service", name]["spec"]["selector"]
        assert labels.items() <= pods[name]["metadata"]["labels"].items()


def test_containers_have_no_rights_and_what_they_mount_is_there(manifests, pods):
    made = {"ca.crt", "server.crt", "server.key", "bandwidth.token"}
    for name, pod in pods.items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        claims = manifests["StatefulSet", name]["spec"]["volumeClaimTemplates"] if name == "superlink" else []
        there = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
        [secrets] = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert {item["key"] for item in secrets["items"]} <= made
        given = {f"/run/secrets/{item['path']}" for item in secrets["items"]}
        for container in spec["containers"]:
            rights = container["securityContext"]
            assert rights == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= there
            assert set(re.findall(r"/run/secrets/\w+", " ".join(container["command"]))) <= given


def test_the_gate_finds_in_its_configuration_what_it_changes(pods, tmp_path):
    [gate] = [c for c in pods["gate"]["spec"]["containers"] if c["name"] == "gate"]
    script = gate["command"][2].replace("/etc/resolv.conf", f"{tmp_path}/resolv.conf")
    script = script.replace("/etc/nginx/nginx.conf", str(DEPLOY / "gate.conf")).replace(
        "/tmp/nginx.conf", f"{tmp_path}/it"
    )
    (tmp_path / "resolv.conf").write_text("search x\nnameserver 192.0.2.53\nnameserver 192.0.2.54\n")
    subprocess.run(["sh", "-c", script.replace("exec nginx", "exec true")], check=True)
    conf = (tmp_path / "it").read_text()
    assert "resolver 192.0.2.53 valid=5s" in conf
    assert "set $superlink https://superlink.fleet-space.svc.cluster.local:8000;" in conf
    assert "127.0.0.11" not in conf
