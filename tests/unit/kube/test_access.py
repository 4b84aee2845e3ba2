"""Who we are to the API server, and how a rotated token gets in."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmbridge.kube.access import RELOAD_S, REREAD_S, Access
from slurmbridge.pool.errors import ConfigError
from tests.support.clock import HandClock
from tests.support.kube_pki import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("pki"))
    made.create()
    return made


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


@pytest.fixture
def in_cluster(
    clock: HandClock, token: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> Access:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return Access.in_cluster(clock, str(token), str(authority.crt))


def write_kubeconfig(
    path: Path, user: dict[str, Any], server: str = "http://127.0.0.1:1/", **cluster: Any
) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "k", "cluster": {"server": server, **cluster}}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "current-context": "c",
            }
        )
    )
    return path


async def test_the_service_account_is_used_with_its_token_stripped(in_cluster: Access) -> None:
    assert await in_cluster.headers() == {"Authorization": "Bearer first"}
    assert in_cluster.server == "https://[fd00::1]:443"
    assert in_cluster.context is not None
    assert in_cluster.context.verify_mode is ssl.CERT_REQUIRED


async def test_a_rotated_token_is_picked_up_within_a_minute(
    in_cluster: Access, token: Path, clock: HandClock
) -> None:
    await in_cluster.load()
    token.write_text("second")
    await clock.advance(REREAD_S - 1)
    assert await in_cluster.headers() == {"Authorization": "Bearer first"}
    await clock.advance(1)
    assert await in_cluster.headers() == {"Authorization": "Bearer second"}


async def test_a_wall_clock_that_is_set_back_does_not_stop_the_rotation(
    in_cluster: Access, token: Path, clock: HandClock
) -> None:
    await in_cluster.load()
    clock.step_wall(-86400)
    token.write_text("second")
    await clock.advance(REREAD_S)
    assert await in_cluster.headers() == {"Authorization": "Bearer second"}


async def test_a_token_file_that_is_empty_for_a_moment_does_no_harm(
    in_cluster: Access, token: Path, clock: HandClock
) -> None:
    await in_cluster.load()
    token.write_text("")
    await clock.advance(REREAD_S)
    assert await in_cluster.headers() == {"Authorization": "Bearer first"}
    token.unlink()
    await clock.advance(REREAD_S)
    assert await in_cluster.headers() == {"Authorization": "Bearer first"}


async def test_a_refusal_leads_to_the_new_token_at_once(
    in_cluster: Access, token: Path, clock: HandClock
) -> None:
    used = await in_cluster.headers()
    token.write_text("second")
    await clock.advance(RELOAD_S)
    assert await in_cluster.reload_after_refusal(used)
    assert await in_cluster.headers() == {"Authorization": "Bearer second"}


async def test_many_refusals_at_once_lead_to_one_reload(
    in_cluster: Access, token: Path, clock: HandClock
) -> None:
    used = await in_cluster.headers()
    token.write_text("second")
    await clock.advance(RELOAD_S)
    assert [await in_cluster.reload_after_refusal(used) for _ in range(3)] == [True] * 3
    token.write_text("third")
    assert not await in_cluster.reload_after_refusal(await in_cluster.headers())


async def test_a_refusal_of_the_only_token_there_is_is_not_tried_again(
    in_cluster: Access, clock: HandClock
) -> None:
    used = await in_cluster.headers()
    await clock.advance(RELOAD_S)
    assert not await in_cluster.reload_after_refusal(used)


async def test_outside_of_a_pod_the_service_account_is_a_configuration_error(
    in_cluster: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ConfigError, match="host/port"):
        await in_cluster.load()


async def test_a_kubeconfig_gives_server_token_and_tls_name(
    clock: HandClock, tmp_path: Path, authority: Authority
) -> None:
    path = write_kubeconfig(
        tmp_path / "kubeconfig",
        {"token": "abc"},
        "https://127.0.0.1:6443/prefix/",
        **{
            "certificate-authority": str(authority.crt),
            "tls-server-name": "kubernetes",
            "proxy-url": "http://proxy:3128",
        },
    )
    access = Access.from_kubeconfig(str(path), clock)
    assert await access.headers() == {"Authorization": "Bearer abc"}
    assert access.server == "https://127.0.0.1:6443/prefix"
    assert (access.server_name, access.proxy) == ("kubernetes", "http://proxy:3128")


async def test_a_token_file_of_a_kubeconfig_is_read_again_after_a_refusal(
    clock: HandClock, tmp_path: Path, token: Path
) -> None:
    path = write_kubeconfig(tmp_path / "kubeconfig", {"tokenFile": str(token)})
    access = Access.from_kubeconfig(str(path), clock)
    used = await access.headers()
    token.write_text("second")
    await clock.advance(RELOAD_S)
    assert await access.reload_after_refusal(used)
    assert await access.headers() == {"Authorization": "Bearer second"}


async def test_an_exec_plugin_is_asked_again_after_a_refusal(
    clock: HandClock, tmp_path: Path
) -> None:
    counter = tmp_path / "count"
    counter.write_text("")
    script = (
        f'printf x >> {counter}; printf \'{{"apiVersion":"client.authentication.k8s.io/v1",'
        f'"kind":"ExecCredential","status":{{"token":"t%s"}}}}\' $(wc -c < {counter})'
    )
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "sh",
            "args": ["-c", script],
            "interactiveMode": "Never",
        }
    }
    access = Access.from_kubeconfig(str(write_kubeconfig(tmp_path / "k", user)), clock)
    used = await access.headers()
    assert used == {"Authorization": "Bearer t1"}
    await clock.advance(RELOAD_S)
    assert await access.reload_after_refusal(used)
    assert await access.headers() == {"Authorization": "Bearer t2"}


async def test_a_client_certificate_needs_no_header(
    clock: HandClock, tmp_path: Path, authority: Authority
) -> None:
    client = authority.issue("bridge", client=True)
    user = {"client-certificate": str(client.crt), "client-key": str(client.key)}
    path = write_kubeconfig(
        tmp_path / "k",
        user,
        "https://127.0.0.1:6443",
        **{"certificate-authority": str(authority.crt)},
    )
    access = Access.from_kubeconfig(str(path), clock)
    assert await access.headers() == {}
    assert access.context is not None


FAULTS = {
    "no credentials at all": ({}, "no credentials"),
    "empty token": ({"token": ""}, "no credentials"),
    "blank token": ({"token": "  "}, "no Authorization header"),
    "token with a line feed inside": ({"token": "a\nb"}, "cannot hold"),
    "token file that is not there": ({"tokenFile": "/nonexistent/token"}, "No such file"),
    "exec plugin that fails": (
        {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "false"}},
        "no credentials",
    ),
}


@pytest.mark.parametrize(("user", "text"), FAULTS.values(), ids=FAULTS)
async def test_what_gives_no_credentials_is_a_configuration_error(
    clock: HandClock, tmp_path: Path, user: dict[str, Any], text: str
) -> None:
    access = Access.from_kubeconfig(str(write_kubeconfig(tmp_path / "k", user)), clock)
    with pytest.raises(ConfigError, match=text):
        await access.load()


@pytest.mark.parametrize("text", [None, "", "]", "a: b", "clusters: []"])
async def test_what_is_no_kubeconfig_is_a_configuration_error(
    clock: HandClock, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        await Access.from_kubeconfig(str(path), clock).load()
