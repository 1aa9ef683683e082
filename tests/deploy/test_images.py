"""The images and the systemd unit: what they install is pinned, and they take no right that is not needed."""

import re
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from deploy_tools import DEPLOY, ROOT, run, tool
from packaging.requirements import Requirement

from server.run.commands import BAD_USAGE, PORT_IN_USE

IMAGES = [DEPLOY / "Dockerfile.cpu", DEPLOY / "Dockerfile.cuda"]
LOCKS = [DEPLOY / "requirements.txt", DEPLOY / "torch.txt"]

named = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)


def steps(image: Path) -> list[str]:
    """The instructions of a Dockerfile, each in one line."""
    text = re.sub(r"^#.*\n", "", image.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def locked() -> dict[str, str]:
    """The version of each pinned package."""
    text = "".join(path.read_text() for path in LOCKS)
    return dict(re.findall(r"^([a-z0-9-]+)==([\w.]+)", text, flags=re.MULTILINE))


def test_every_dependency_is_pinned_in_a_version_that_the_project_takes() -> None:
    versions = locked()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for text in [*project["project"]["dependencies"], *project["build-system"]["requires"]]:
        wanted = Requirement(text)
        assert wanted.name in versions, "run deploy/lock.sh"
        assert wanted.specifier.contains(versions[wanted.name]), "run deploy/lock.sh"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_hashes(lock: Path) -> None:
    pins = re.split(r"^(?=[a-z])", lock.read_text(), flags=re.MULTILINE)[1:]
    assert pins and all("--hash=sha256:" in pin for pin in pins)


@named
def test_pip_installs_nothing_that_is_not_pinned(image: Path) -> None:
    torch = f"torch=={locked()['torch']}"
    for step in steps(image):
        for command in re.findall(r"pip install [^;&]*", step):
            own_index = '--index-url "$TORCH_INDEX"' in command and command.rstrip().endswith(torch)
            pinned = "--require-hashes" in command or command.rstrip().endswith("--no-build-isolation .")
            assert own_index or ("--no-deps" in command and pinned)


@named
def test_the_volume_belongs_to_the_user_who_writes_there(image: Path) -> None:
    lines = steps(image)
    user, volume = (
        lines.index("USER 10001:10001"),
        next(i for i, line in enumerate(lines) if line.startswith("VOLUME")),
    )
    folder = lines[volume].split()[1]
    assert any(line.startswith("RUN mkdir") and folder in line for line in lines[user:volume])


@named
def test_the_image_is_healthy_while_it_lives_and_runs_with_no_right(image: Path) -> None:
    health = next(line for line in steps(image) if line.startswith("HEALTHCHECK"))
    assert "/live" in health
    for option in ("--read-only", "--tmpfs /tmp", "--cap-drop ALL", "no-new-privileges", "-p 127.0.0.1:"):
        assert option in image.read_text()


@named
def test_the_wheel_gets_its_c_kernels(image: Path) -> None:
    """The stage that builds it has a compiler before it does."""
    build = steps(image)[: steps(image).index("FROM ${PYTHON}")]
    compiler = next(i for i, step in enumerate(build) if "apt-get install" in step and " gcc " in step)
    assert compiler < build.index("RUN pip install --no-deps --no-build-isolation .")


def test_kernels_of_an_image_are_kept_in_its_volume() -> None:
    final = " ".join(steps(IMAGES[1])).rsplit(" FROM ${PYTHON} ", 1)[-1]
    assert "TRITON_CACHE_DIR=/home/facet/.cache/" in final and "VOLUME /home/facet/.cache" in final


def test_the_unit_takes_rights_away_and_starts_no_wrong_configuration_again() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read(DEPLOY / "facet.service")
    service = dict(unit["Service"])
    assert service["RestartPreventExitStatus"].split() == [str(BAD_USAGE), str(PORT_IN_USE)]
    assert (service["UMask"], service["CapabilityBoundingSet"]) == ("0077", "")
    assert service["SystemCallFilter"] == "@system-service"
    assert "AF_NETLINK" in service["RestrictAddressFamilies"], "names of hosts are looked up with it"
    text = (DEPLOY / "facet.service").read_text()
    for variable in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        assert f"{variable}=/var/lib/{service['StateDirectory']}/" in text, "ProtectHome= is on"
    assert service["SupplementaryGroups"] == "video"
    for name in ("NoNewPrivileges", "LockPersonality", "RestrictNamespaces", "ProtectKernelModules"):
        assert service[name] == "true"
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "ProcSubset"} & service.keys()


@named
def test_hadolint_finds_nothing(image: Path) -> None:
    assert run("hadolint", "--no-color", image) == ""


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    tool("systemd-analyze")
    unit = tmp_path / "facet.service"
    unit.write_text((DEPLOY / "facet.service").read_text().replace("/opt/facet/bin/facet serve", "/bin/true"))
    assert run("systemd-analyze", "verify", unit) == ""
