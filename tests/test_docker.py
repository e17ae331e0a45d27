"""Deployment files: they parse, their commands are known, and the image holds what the wheel is built from."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl_ragged.profiles.profile_cache import VARIABLE
from sgl_ragged.sglang_contract import RELEASES
from tests.command_lines import ROOT, parse

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SCRIPT = DOCKER / "calibrate.sh"

SERVER_FLAGS = {"--model-path", "--kv-pool", "--ragged-profile", "--enable-metrics", "--host", "--port"}


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def kubernetes() -> dict[str, dict[str, Any]]:
    """Return the manifest's objects by kind; of volume claims the last."""
    return {one["kind"]: one for one in yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())}


def pod() -> dict[str, Any]:
    return kubernetes()["Deployment"]["spec"]["template"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield commands of containers, the script's and those of comments, as words."""
    for name, service in compose()["services"].items():
        if "command" in service:
            yield f"compose: {name}", service["command"]
    for container in (*pod()["spec"]["initContainers"], *pod()["spec"]["containers"]):
        yield f"kubernetes: {container['name']}", container["command"]
    for line in re.findall(r"^python3 .*$", SCRIPT.read_text(), re.MULTILINE):
        yield "calibrate.sh", line.split()
    for words in re.findall(r"^CMD \[(.*)\]$", DOCKERFILE, re.MULTILINE):
        yield "Dockerfile", [word.strip(' "') for word in words.split(",")]


def test_options_are_known():
    parsed = {name: parse(shlex.join(words)) for name, words in commands()}
    assert {name: command.unknown() for name, command in parsed.items() if command and command.unknown()} == {}
    assert {name for name, command in parsed.items() if command} == {
        *("compose: server", "kubernetes: server", "calibrate.sh", "Dockerfile")
    }
    for name in ("compose: server", "kubernetes: server"):
        assert set(parsed[name].options) == SERVER_FLAGS


def test_the_image_is_of_a_release_that_is_served():
    (tag,) = re.findall(r"^ARG SGLANG=v(\S+)$", DOCKERFILE, re.MULTILINE)
    assert tag in RELEASES


def test_the_image_installs_the_wheel_that_is_tested():
    """The image installs what `make wheel` installs: the wheel with its requirements, and the extra for calibration."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, targets = settings["project"], settings["tool"]["hatch"]["build"]["targets"]
    copied = [word for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", project["readme"], *project["license-files"], *targets["wheel"]["packages"]} == set(
        copied
    )
    assert all((ROOT / path).exists() for path in copied)
    assert "pip wheel --no-deps --wheel-dir /wheels ." in DOCKERFILE
    (extra,) = project["optional-dependencies"]
    assert f'/wheels/{project["name"].replace("-", "_")}-*.whl)[{extra}]"' in DOCKERFILE


def test_profiles_are_on_a_volume():
    """Profiles that a server makes itself, and those of the script, outlive the container."""
    assert f"ENV {VARIABLE}=/profiles" in DOCKERFILE
    assert "VOLUME /profiles" in DOCKERFILE
    services = compose()["services"]
    for name in ("calibrate", "server"):
        assert "profiles:/profiles" in services[name]["volumes"]
        assert services[name]["environment"]["PROFILE"] == "${PROFILE:-/profiles/model.safetensors}"
    for container in (*pod()["spec"]["initContainers"], *pod()["spec"]["containers"]):
        assert {"name": "profiles", "mountPath": "/profiles"} in container["volumeMounts"]


def test_ports_and_probes():
    annotations = pod()["metadata"]["annotations"]
    (server,) = pod()["spec"]["containers"]
    port = server["command"][server["command"].index("--port") + 1]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/path": "/metrics",
        "prometheus.io/port": port,
    }
    assert [one["containerPort"] for one in server["ports"]] == [int(port)]
    assert server["readinessProbe"]["httpGet"] == {"path": "/health_generate", "port": "http"}
    assert kubernetes()["Service"]["spec"]["selector"] == pod()["metadata"]["labels"]
    claims = {one["persistentVolumeClaim"]["claimName"] for one in pod()["spec"]["volumes"] if "emptyDir" not in one}
    named = re.findall(
        r"kind: PersistentVolumeClaim\nmetadata:\n  name: (\S+)", (DOCKER / "kubernetes.yaml").read_text()
    )
    assert claims == set(named)
    targets = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert targets == [{"targets": [f"server:{port}"]}]


@pytest.fixture
def calibrate(tmp_path):
    """Run the script with a stand-in for `python3`, which leaves recordings and ends as asked."""
    if shutil.which("flock") is None:
        pytest.skip("needs flock")
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS"\nmkdir -p "$PROFILE.recordings"\n[ "$ENDS" = 0 ] || exit "$ENDS"\n'
        'while [ "$1" != --output ]; do shift; done\necho made > "$2"\n'
    )
    stand_in.chmod(0o755)

    def run(*arguments: str, ends: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{stand_in.parent}:/usr/bin:/bin",
            "MODEL": "owner/model",
            "PROFILE": str(tmp_path / "one.safetensors"),
            "CALLS": str(tmp_path / "calls"),
            "ENDS": str(ends),
        }
        return subprocess.run(["sh", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)

    return run


def test_a_profile_is_made_once(calibrate, tmp_path):
    assert calibrate("--samples", "4").returncode == 0
    assert (tmp_path / "one.safetensors").read_text() == "made\n"
    assert not (tmp_path / "one.safetensors.recordings").exists()
    assert calibrate().stdout == f"found {tmp_path}/one.safetensors\n"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith("-m calib run --model owner/model ")
    assert call.endswith(" --samples 4")


def test_a_failed_calibration_leaves_no_profile(calibrate, tmp_path):
    assert calibrate(ends=1).returncode == 1
    assert not (tmp_path / "one.safetensors").exists()
    assert (tmp_path / "one.safetensors.recordings").is_dir()
    assert calibrate().returncode == 0


def test_the_script_needs_a_model():
    done = subprocess.run(["sh", str(SCRIPT)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MODEL" in done.stderr


def test_the_script_can_be_started():
    assert Path(SCRIPT).stat().st_mode & 0o111
