"""`slurmbridge-extender`: the command line, and the life of the process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from extender.apiserver import ApiServer
from extender.app import Extender, Listen
from extender.check import check
from extender.server import Bounds
from extender.sight import Limits
from extender.tls import TlsFiles, server_context
from slurmbridge import log
from slurmbridge.clock import SystemClock
from slurmbridge.kube.access import Access
from slurmbridge.kube.session import KubeSession
from slurmbridge.link.address import Address, check_security, parse_address
from slurmbridge.link.client import LinkClient
from slurmbridge.link.tls import Tls
from slurmbridge.pool.errors import ConfigError, ParseError, Problem
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.view import View

_log = log.get_logger(__name__)

RUN_HELP: Final = """\
Serve kube-scheduler: POST /filter, /prioritize, /bind and /preempt.

It needs two things: the bridges (--bridge), which stream it the state of the pool and grant it
claims, and the API server (--kubeconfig, or the pod's own service account), where it posts
Bindings: the verb `create` on `pods/binding` and `get` on `pods`, nothing else.

On one host, to try it:
  slurmbridge-extender run --bridge 127.0.0.1:7443 --kubeconfig ~/.kube/config

In a cluster (manifests/ does this):
  slurmbridge-extender run --bridge slurmbridge.slurmbridge.svc:7443 \\
    --bridge-tls-cert /tls/tls.crt --bridge-tls-key /tls/tls.key --bridge-tls-ca /tls/ca.crt \\
    --listen 0.0.0.0:8443 --tls-cert /tls/tls.crt --tls-key /tls/tls.key \\
    --tls-client-ca /tls/scheduler-ca.crt --admin-listen 0.0.0.0:8081

kube-scheduler is told of it in its configuration:
  extenders:
    - urlPrefix: https://slurmbridge-extender.slurmbridge.svc:8443
      filterVerb: filter
      prioritizeVerb: prioritize
      bindVerb: bind
      preemptVerb: preempt
      weight: 100              # so that our order wins over the in-tree scores
      enableHTTPS: true
      tlsConfig: {caFile: ca.crt, certFile: scheduler.crt, keyFile: scheduler.key}
      nodeCacheCapable: true   # names, not whole nodes
      ignorable: false         # without us no GPU pod is placed on the pool
      httpTimeout: 5s
      managedResources: [{name: nvidia.com/gpu}]
"""

CHECK_HELP: Final = """\
Try everything that `run` needs, with the same options, and say what is wrong:
the bridge (is there a leader, a view, how old), the API server (may we post Bindings), the
certificates. Exit status 0: all is well, 1: something is not.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 0, 1 (failed) or 2 (wrong use)."""
    options = _parser().parse_args(argv)
    log.configure(options.log_level, component="extender")
    try:
        if options.command == "check":
            return asyncio.run(_check(options))
        return asyncio.run(_run(options))
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"slurmbridge-extender: {problem.path}: {problem.text}\n")
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(options: argparse.Namespace) -> int:
    clock = SystemClock()
    listen, admin = _address(options, "listen"), _address(options, "admin_listen")
    files = _tls_files(options)
    check_security(listen, has_tls=files is not None, insecure=options.insecure, path="--listen")
    tls = None if files is None else server_context(files)
    if not listen.is_this_host and (files is None or not files.client_ca):
        _log.warning("whoever reaches this port may have pods bound: no --tls-client-ca")

    def compile_early(_view: View | None, _policy: Policy | None) -> None:
        extender.sight.index()  # so that no request has to wait for it

    link = _link(options, clock, compile_early)
    async with KubeSession(Access.choose(options.kubeconfig, clock, options.context)) as session:
        api = ApiServer(session, lambda: None if link.policy is None else link.policy.resources)
        extender = Extender(
            link,
            api.post,
            api.asks_for_gpus,
            clock,
            token=secrets.token_hex(3),
            limits=Limits(stale=options.stale_s, blind=options.blind_s),
            bounds=Bounds(body_bytes=options.max_body_mib << 20),
        )
        await extender.start(Listen(listen.host, listen.port), Listen(admin.host, admin.port), tls)
        # All that was imported lives as long as we do. Looking through it costs a full collection
        # 80 ms; a view has nothing that the collector must look at (its structs say gc=False).
        gc.collect()
        gc.freeze()
        following = asyncio.create_task(link.run())
        asked = asyncio.create_task(_stop_signal())
        try:
            await asyncio.wait((following, asked), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                _log.error("the link has ended by itself")
                return 1
        finally:
            asked.cancel()
            await extender.stop()
            await link.close()
    return 0


async def _check(options: argparse.Namespace) -> int:
    clock = SystemClock()
    files = _tls_files(options)
    if files is not None:
        server_context(files)
    has_view = asyncio.Event()

    def heard(view: View | None, policy: Policy | None) -> None:
        if view is not None and policy is not None:
            has_view.set()

    link = _link(options, clock, heard)
    access = Access.choose(options.kubeconfig, clock, options.context)
    findings = await check(link, has_view, access, options.within_s)
    if options.output == "json":
        sys.stdout.write(msgspec.json.encode(findings).decode() + "\n")
    else:
        for finding in findings:
            sys.stdout.write(
                f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.text}\n"
            )
    return 0 if all(finding.ok for finding in findings) else 1


async def _stop_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def _link(
    options: argparse.Namespace,
    clock: SystemClock,
    on_change: Callable[[View | None, Policy | None], None],
) -> LinkClient:
    parts = (options.bridge_tls_cert, options.bridge_tls_key, options.bridge_tls_ca)
    if any(parts) and not all(parts):
        text = "needs --bridge-tls-cert, --bridge-tls-key and --bridge-tls-ca together"
        raise ConfigError([Problem("--bridge-tls-cert", text)])
    return LinkClient(
        options.bridge,
        clock=clock,
        rng=secrets.SystemRandom().random,
        tls=Tls(*parts) if all(parts) else None,
        insecure=options.bridge_insecure,
        server_name=options.bridge_tls_name,
        name=options.name,
        on_change=on_change,
    )


def _address(options: argparse.Namespace, name: str) -> Address:
    try:
        address = parse_address(getattr(options, name))
    except ParseError as error:
        raise ConfigError([Problem(f"--{name.replace('_', '-')}", str(error))]) from error
    if address.path:
        text = "kube-scheduler speaks HTTP over TCP only: expected host:port"
        raise ConfigError([Problem(f"--{name.replace('_', '-')}", text)])
    return address


def _tls_files(options: argparse.Namespace) -> TlsFiles | None:
    if bool(options.tls_cert) != bool(options.tls_key):
        raise ConfigError([Problem("--tls-cert", "needs --tls-cert and --tls-key together")])
    if not options.tls_cert:
        if options.tls_client_ca:
            raise ConfigError([Problem("--tls-client-ca", "needs --tls-cert and --tls-key")])
        return None
    return TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurmbridge-extender",
        description="kube-scheduler extender for a pool of GPU nodes that Slurm shares.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, told, text in (
        ("run", "serve kube-scheduler", RUN_HELP),
        ("check", "try everything that run needs", CHECK_HELP),
    ):
        command = commands.add_parser(
            name,
            help=told,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_options(command)
    check_command = commands.choices["check"]
    check_command.add_argument("-o", dest="output", choices=("text", "json"), default="text")
    check_command.add_argument(
        "--within-s", type=_seconds, default=10.0, metavar="S", help="longest wait for each"
    )
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    bridge = parser.add_argument_group("the bridge")
    bridge.add_argument(
        "--bridge",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="where bridges are; a name may stand for all replicas; may be given again",
    )
    bridge.add_argument("--bridge-tls-cert", default="", metavar="FILE", help="our certificate")
    bridge.add_argument("--bridge-tls-key", default="", metavar="FILE", help="its key")
    bridge.add_argument("--bridge-tls-ca", default="", metavar="FILE", help="CA of the bridges")
    bridge.add_argument(
        "--bridge-tls-name",
        default="",
        metavar="NAME",
        help="name in the certificate of the bridges (default: the host of --bridge)",
    )
    bridge.add_argument(
        "--bridge-insecure", action="store_true", help="plain text over the network"
    )
    bridge.add_argument(
        "--name",
        default=platform.node() or "extender",
        help="who we are, for the log of the bridge (default: the name of this host)",
    )
    kube = parser.add_argument_group("the API server")
    kube.add_argument(
        "--kubeconfig", default="", metavar="FILE", help="default: the pod's service account"
    )
    kube.add_argument("--context", default=None, metavar="NAME", help="of the kubeconfig")
    serve = parser.add_argument_group("serving")
    serve.add_argument(
        "--listen", default="127.0.0.1:8888", metavar="HOST:PORT", help="default: %(default)s"
    )
    serve.add_argument("--tls-cert", default="", metavar="FILE", help="certificate chain")
    serve.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    serve.add_argument(
        "--tls-client-ca",
        default="",
        metavar="FILE",
        help="kube-scheduler must show a certificate of this CA; without it anyone may ask",
    )
    serve.add_argument(
        "--insecure", action="store_true", help="plain HTTP on an address of the network"
    )
    serve.add_argument(
        "--admin-listen",
        default="127.0.0.1:8889",
        metavar="HOST:PORT",
        help="/livez /readyz /metrics /debug/snapshot (default: %(default)s)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--stale-s",
        type=_seconds,
        default=Limits().stale,
        metavar="S",
        help="a view older than this, and than two polls of Slurm, only refuses "
        "(default: %(default)s)",
    )
    limits.add_argument(
        "--blind-s",
        type=_seconds,
        default=Limits().blind,
        metavar="S",
        help="a view older than this answers nothing (default: %(default)s)",
    )
    limits.add_argument(
        "--max-body-mib",
        type=_mib,
        default=Bounds().body_bytes >> 20,
        metavar="MIB",
        help="largest request (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("expected 0.1 to 3600 seconds")
    return value


def _mib(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 256:
        raise argparse.ArgumentTypeError("expected 1 to 256 MiB")
    return value
