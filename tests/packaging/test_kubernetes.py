"""The manifests: what they say, as Kubernetes' own programs read them, and run without a cluster."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from typer.main import get_command

from kvstore import Client
from kvstore.admin.app import make
from kvstore.cli import app
from kvstore.config import GIB, MIB
from kvstore.daemon.doctor import operators
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import DeniedError
from tests.admin.serving import free_port
from tests.certificates import certificates
from tests.daemons import eventually, got, idle, names, new_layout, payloads, tier
from tests.packaging.manifests import CONTAINERS, FOLDER, POD, SETTINGS, in_cluster, manifest, with_metrics
from tests.packaging.recipe import RECIPE
from tests.packaging.sources import ROOT, answers, run, running
from tests.programs import need, path_of

# -- what the files say


def quantity(text: str) -> int:
    units = {"Gi": GIB, "Mi": MIB}
    return int(text[:-2]) * units[text[-2:]]


def test_sockets_and_folders_of_the_configuration_are_mounted_from_the_host() -> None:
    loaded = in_cluster()
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    for name in ("daemon", "admin"):
        mounts = {m["mountPath"]: m for m in CONTAINERS[name]["volumeMounts"]}
        assert volumes[mounts["/etc/kvstore"]["name"]]["configMap"]["name"] == "kvstore"
        # Where an engine's pod may be root, nobody is to be an operator.
        for path in (loaded.daemon.for_operators, loaded.admin.socket):
            assert "emptyDir" in volumes[mounts[str(path.parent)]["name"]]
        assert CONTAINERS[name]["env"] == [
            {"name": "KVSTORE_SOCKET", "value": f"unix://{loaded.daemon.for_operators}"}
        ]
        # Supervisor and libraries write there, and nothing else of the root can be written.
        assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
    assert loaded.nvme.path
    served = {m["mountPath"]: m["name"] for m in CONTAINERS["daemon"]["volumeMounts"]}
    assert volumes[served[str(loaded.daemon.socket.parent)]]["hostPath"]["path"] == "/run/kvstore"
    assert {line.level for line in operators(loaded)} == {"ok"}
    mounted = {Path(m["mountPath"]) for m in CONTAINERS["daemon"]["volumeMounts"]}
    assert loaded.nvme.path.parent in mounted
    owned = {Path(word) for word in CONTAINERS["folders"]["command"] if word.startswith("/")}
    assert owned == {loaded.daemon.socket.parent, loaded.nvme.path.parent}
    assert owned == {Path(m["mountPath"]) for m in CONTAINERS["folders"]["volumeMounts"]}


def test_memory_and_time_are_enough() -> None:
    loaded = in_cluster()
    limit = quantity(CONTAINERS["daemon"]["resources"]["limits"]["memory"])
    assert quantity(CONTAINERS["daemon"]["resources"]["requests"]["memory"]) == limit
    blocks = (loaded.dram.limit + loaded.nvme.limit) // (64 << 10)
    assert limit >= loaded.dram.limit + 200 * blocks + GIB
    assert POD["terminationGracePeriodSeconds"] >= loaded.daemon.stop_timeout + 5


def test_no_two_daemons_share_a_node_during_an_update() -> None:
    assert manifest("daemonset.yaml")["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0


def test_probes_end_no_daemon_and_ask_for_existing_paths() -> None:
    assert not any(name.endswith("Probe") for name in CONTAINERS["daemon"]), "a failed probe loses DRAM"
    paths = set(make(in_cluster(), "unix:///run/kvstore/kvstore.sock").openapi()["paths"])
    for probe, path in {"readinessProbe": "/readyz", "livenessProbe": "/livez"}.items():
        command = CONTAINERS["admin"][probe]["exec"]["command"]
        assert command[-1] == f"http://localhost{path}"
        assert path in paths
        assert command[command.index("--unix-socket") + 1] == str(in_cluster().admin.socket)
    assert "curl" in " ".join(RECIPE.of(RECIPE.final, "RUN"))


def test_containers_run_existing_commands_and_are_locked_down() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name in ("daemon", "admin"):
        command, *options = CONTAINERS[name]["args"]
        known = {name for param in commands[command].params for name in param.opts}
        assert {option for option in options if option.startswith("-")} <= known
        assert options[-1] == "/etc/kvstore/kvstore.toml"
    user = POD["securityContext"]["runAsUser"]
    assert RECIPE.of(RECIPE.final, "USER") == [f"{user}:{POD['securityContext']['runAsGroup']}"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["securityContext"]["runAsNonRoot"]
    for name, each in CONTAINERS.items():
        context = each["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["capabilities"].get("add", []) == (["CHOWN"] if name == "folders" else [])


def test_the_images_have_this_version() -> None:
    [image] = manifest("kustomization.yaml")["images"]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert str(image["newTag"]) == version[1]
    assert {each["image"] for each in CONTAINERS.values()} == {image["name"]}


def test_the_pod_of_an_engine_reaches_the_socket() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
    spec = yaml.safe_load(text)["spec"]
    [engine], [volume] = spec["containers"], spec["volumes"]
    [mount], [variable] = engine["volumeMounts"], engine["env"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"], "a pod's root could put another socket there"
    assert volume["hostPath"]["path"] == "/run/kvstore"
    assert variable == {"name": "KVSTORE_SOCKET", "value": f"unix://{in_cluster().daemon.socket}"}
    assert spec["securityContext"]["supplementalGroups"] == [POD["securityContext"]["runAsGroup"]]
    assert in_cluster().daemon.socket_mode & 0o060 == 0o060


# -- as Kubernetes' programs read them


@pytest.fixture(params=["base", "metrics"])
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file with what kubectl renders, and its documents by kind."""
    need("kubectl")
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    if request.param == "metrics":
        file = folder / "kustomization.yaml"
        file.write_text(with_metrics(file.read_text()))
    file = tmp_path / "rendered.yaml"
    file.write_text(run(path_of("kubectl"), "kustomize", str(folder)))
    documents = {document["kind"]: document for document in yaml.safe_load_all(file.read_text())}
    assert ("PodMonitor" in documents) == (request.param == "metrics")
    return file, documents


def test_the_renderer_adds_the_tag_the_configuration_and_the_port(
    rendered: tuple[Path, dict[str, Any]],
) -> None:
    _, documents = rendered
    assert {"Namespace", "ConfigMap", "DaemonSet"} == documents.keys() - {"PodMonitor"}
    assert documents["ConfigMap"]["data"] == {"kvstore.toml": SETTINGS}
    # A hash in this name would replace all pods when the configuration changes.
    assert documents["ConfigMap"]["metadata"]["name"] == "kvstore"
    [image] = manifest("kustomization.yaml")["images"]
    expected = manifest("daemonset.yaml")
    pod = expected["spec"]["template"]["spec"]
    for each in pod["containers"] + pod["initContainers"]:
        each["image"] = f"{image['newName']}:{image['newTag']}"
    if "PodMonitor" in documents:
        [admin] = [each for each in pod["containers"] if each["name"] == "admin"]
        mount = {"name": "certificate", "mountPath": "/etc/kvstore-certificate", "readOnly": True}
        admin["volumeMounts"].append(mount)
        admin["ports"] = [{"name": "metrics", "containerPort": 9400}]
        pod["volumes"].append({"name": "certificate", "secret": {"secretName": "kvstore-certificate"}})
        monitor = documents["PodMonitor"]["spec"]
        assert monitor["selector"] == expected["spec"]["selector"]
        assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ["metrics"]
    assert in_order(documents["DaemonSet"]) == in_order(expected)


def in_order(value: Any) -> Any:
    """Returns a document with its lists of named things by name: the renderer puts patched ones first."""
    if isinstance(value, dict):
        return {name: in_order(each) for name, each in value.items()}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return sorted(map(in_order, value), key=lambda each: str(each.get("name")))
    return value


def test_the_schemas_of_kubernetes_have_every_field(rendered: tuple[Path, dict[str, Any]]) -> None:
    """PodMonitor is of the Prometheus Operator, and has no schema there."""
    need("kubernetes-validate")
    said = run(path_of("kubernetes-validate"), "--strict", str(rendered[0]))
    assert said.count(" passed for resource ") == 3, said


# -- run as in the pod


class PodOnThisMachine:
    """The folders of the pod in a folder of this machine, with small tiers and the lines for Prometheus."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = new_token(bytes(32))
        self.port = free_port()
        for name in (
            "etc/kvstore",
            "etc/kvstore-certificate",
            "run/kvstore",
            "run/operators",
            "var/lib/kvstore",
        ):
            (root / name).mkdir(parents=True)
        text = with_metrics(SETTINGS).replace("sha256:...", f"sha256:{hash_of(self.token).hex()}")
        for limit, small in {
            "16GiB": "16MiB",
            "200GiB": "64MiB",
            "0.0.0.0:9400": f"127.0.0.1:{self.port}",
        }.items():
            assert limit in text
            text = text.replace(limit, small)
        (root / "etc/kvstore/kvstore.toml").write_text(self.placed(text))
        self.authority, served = certificates(x509.DNSName("kvstore"))
        for name in ("tls.crt", "tls.key"):
            (root / "etc/kvstore-certificate" / name).write_bytes(served)

    def placed(self, text: str) -> str:
        """Returns text with the pod's folders replaced by this machine's."""
        return re.sub(r"/(etc|run|var/lib)/(kvstore|operators)", rf"{self.root}/\1/\2", text)

    @contextmanager
    def container(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a container's command until the block ends."""
        variables = {each["name"]: self.placed(each["value"]) for each in CONTAINERS[name]["env"]}
        args = [self.placed(each) for each in CONTAINERS[name]["args"]]
        with running(sys.executable, "-m", "kvstore", *args, env=os.environ | variables) as process:
            yield process

    def probe(self, name: str) -> bool:
        """Returns whether a probe of the REST interface succeeds."""
        command = [self.placed(each) for each in CONTAINERS["admin"][name]["exec"]["command"]]
        return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0

    def scrape(self) -> tuple[int, str]:
        """Asks for metrics as the PodMonitor says. Returns the status and the text."""
        [endpoint] = manifest("metrics/podmonitor.yaml")["spec"]["podMetricsEndpoints"]
        assert endpoint["scheme"] == "https"
        context = ssl.create_default_context(cadata=self.authority.decode())
        named = endpoint["tlsConfig"]["serverName"]
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=10)
        raw = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        raw.connect()
        connection.sock = context.wrap_socket(raw.sock, server_hostname=named)
        connection.request("GET", endpoint["path"], headers={"Authorization": f"Bearer {self.token}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text


@pytest.fixture
def pod() -> Iterator[PodOnThisMachine]:
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:  # short: the kernel limits paths of sockets
        yield PodOnThisMachine(Path(folder))


def test_the_pod_serves_and_keeps_what_the_page_says(pod: PodOnThisMachine) -> None:
    need("curl")
    engines, operator = (pod.placed(f"unix:///run/{each}/kvstore.sock") for each in ("kvstore", "operators"))
    layout, keys = new_layout(), names(40)

    def contents() -> tuple[int, int]:
        with Client(operator, strict=True) as client:
            status = client.status()
        return tier(status, "dram")["blocks"], tier(status, "nvme")["blocks"]

    with pod.container("daemon") as supervisor:
        before = eventually(lambda: answers(operator), 30)
        with pod.container("admin"):
            for probe in ("livenessProbe", "readinessProbe"):
                eventually(lambda probe=probe: pod.probe(probe), 30)
            status, text = pod.scrape()
            assert (status, "kvstore_up 1.0" in text) == (200, True)
        with Client(engines, strict=True, deadline_s=10) as client:
            assert client.namespace(layout).put(keys, payloads(keys)).stored == 40
            with pytest.raises(DeniedError):  # as root, which is an operator elsewhere
                client.control("events")
        with Client(operator, strict=True) as client:
            assert client.control("events")["events"]
            eventually(lambda: tier(s := client.status(), "nvme")["blocks"] == 40 and idle(s))

        supervisor.send_signal(signal.SIGUSR1)
        again = eventually(lambda: answers(operator, before["pid"]), 30)
        assert contents() == (40, 40)
        os.kill(again["pid"], signal.SIGKILL)
        eventually(lambda: answers(operator, again["pid"]), 30)
        assert contents() == (40, 40)

    with pod.container("daemon"):
        eventually(lambda: answers(operator), 30)
        assert contents() == (0, 40)
        with Client(engines, strict=True, deadline_s=10) as client:
            assert got(client.namespace(layout), keys) == 40
