"""The command line of the bridge."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random  # noqa: TID251 - jitter of the link client
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final

import msgspec

from slurmbridge.clock import SystemClock
from slurmbridge.config import Config, load
from slurmbridge.pool.errors import ConfigError, PeerError, PeerRejected

DEFAULT_CONFIG: Final = "/etc/slurmbridge/config.yaml"
ASK_S: Final = 10.0

OK, FAILED, USAGE, NOT_FOUND, UNAVAILABLE = 0, 1, 2, 3, 4

EPILOG: Final = """\
exit status: 0 good; 1 bad configuration or failed check; 2 wrong usage; 3 no such pod or node;
4 the bridge cannot be reached.

The path of the configuration is taken from --config, else from SLURMBRIDGE_CONFIG, else it is
/etc/slurmbridge/config.yaml. status, explain, who and breaker ask the leading bridge; in a cluster:
  kubectl -n slurmbridge exec deploy/slurmbridge -- slurmbridge status
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `slurmbridge`."""
    args = _parser().parse_args(argv)
    try:
        return int(args.do(args))
    except ConfigError as error:
        _print_problems(error, args)
        return FAILED
    except PeerRejected as error:
        print(f"slurmbridge: {error.text}", file=sys.stderr)
        return NOT_FOUND if error.reason == "notfound" else FAILED
    except PeerError as error:
        print(f"slurmbridge: {error}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurmbridge",
        description="Shares GPU nodes between Slurm and Kubernetes, GPU by GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"slurmbridge {version('slurmbridge')}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, do: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument(
            "--config",
            default=os.environ.get("SLURMBRIDGE_CONFIG", DEFAULT_CONFIG),
            help="configuration file (default: %(default)s)",
        )
        sub.add_argument(
            "-o", "--output", choices=("text", "json"), default="text", help="form of the answer"
        )
        sub.set_defaults(do=do)
        return sub

    def asks(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument(
            "--bridge",
            default="",
            metavar="HOST:PORT",
            help="the bridge's link address (default: link.listen of the configuration)",
        )
        sub.add_argument(
            "--tls-name",
            default="",
            metavar="NAME",
            help="name in the bridge's certificate (default: the host that is called)",
        )
        return sub

    add("run", _run, "run the bridge")
    add("node", _node, "run the agent of a pool node (device plugin, Epilog hold, audit)")
    add("check-config", _check_config, "check the configuration; print every problem with its path")
    add("doctor", _doctor, "check that this site's Slurm is set up as the bridge needs it")
    asks(add("status", _status, "the pool at a glance: GPUs by owner, claims, waiting pods, ages"))
    explain = asks(add("explain", _explain, "why a pod waits, or where it stands"))
    explain.add_argument("pod", metavar="[NAMESPACE/]POD")
    who = asks(add("who", _who, "which GPU of a node belongs to which job or pod"))
    who.add_argument("node", metavar="NODE", help="name in Kubernetes or in Slurm")
    breaker = asks(
        add(
            "breaker",
            _breaker,
            "the eviction breaker: it opens when many claims vanish at once. show it; confirm: the "
            "losses are real, evict; dismiss: the pods stay, find their claims or make them again",
        )
    )
    breaker.add_argument(
        "answer", choices=("show", "confirm", "dismiss"), nargs="?", default="show"
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    from slurmbridge import app
    from slurmbridge.log import configure

    config = load(args.config)
    configure(config.log_level)
    asyncio.run(app.run(config, args.config))
    return OK


def _node(args: argparse.Namespace) -> int:
    from slurmbridge import agent
    from slurmbridge.log import configure

    config = load(args.config)
    configure(config.log_level)
    asyncio.run(agent.run(config))
    return OK


def _check_config(args: argparse.Namespace) -> int:
    config = load(args.config)
    if args.output == "json":
        _print_json({"problems": [], "config": msgspec.to_builtins(config)})
    else:
        effective = msgspec.to_builtins(config)
        print(f"{args.config}: good. In force, defaults included:")
        print(json.dumps(effective, indent=2))
    return OK


def _print_problems(error: ConfigError, args: argparse.Namespace) -> None:
    if getattr(args, "output", "text") == "json":
        _print_json({"problems": [p._asdict() for p in error.problems]})
        return
    for problem in error.problems:
        print(f"{problem.path}: {problem.text}", file=sys.stderr)


def _doctor(args: argparse.Namespace) -> int:
    from slurmbridge.doctor import examine

    findings = asyncio.run(examine(load(args.config)))
    if args.output == "json":
        _print_json({"findings": [msgspec.to_builtins(f) for f in findings]})
    else:
        for finding in findings:
            print(f"{finding.level:<8} {finding.text}")
    return FAILED if any(f.level == "error" for f in findings) else OK


def _ask(args: argparse.Namespace, question: str, **values: str) -> Any:
    """Put one question to the leading bridge."""
    from slurmbridge.link.client import LinkClient
    from slurmbridge.link.tls import Tls

    config = _config_or_none(args)
    address = args.bridge or (config.link.listen if config is not None else "")
    if not address:
        # Say what is wrong with the file.
        load(args.config)
    tls = None
    if config is not None and config.link.tls is not None and not address.startswith("unix:"):
        files = config.link.tls
        tls = Tls(cert=files.cert, key=files.key, ca=files.client_ca)

    async def ask() -> bytes:
        client = LinkClient(
            [_reachable(address)],
            tls=tls,
            insecure=config.link.insecure if config is not None else False,
            clock=SystemClock(),
            rng=random.random,
            name="cli",
            server_name=args.tls_name,
        )
        try:
            return await client.query(question, msgspec.json.encode(values), ASK_S)
        finally:
            await client.close()

    return msgspec.json.decode(asyncio.run(ask()))


def _config_or_none(args: argparse.Namespace) -> Config | None:
    try:
        return load(args.config)
    except ConfigError:
        if not args.bridge:
            raise
        return None


def _reachable(address: str) -> str:
    """A listening address as one to call: all addresses means this host."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "", "[::]") else address  # noqa: S104


def _status(args: argparse.Namespace) -> int:
    answer = _ask(args, "status")
    if args.output == "json":
        _print_json(answer)
        return OK
    slurm = answer["slurm"]
    rows = [
        ("cluster", f"{answer['cluster']} (granularity {answer['granularity']})"),
        ("slurm", f"{slurm['cluster']} {slurm['version']}, read {slurm['ageSeconds']} s ago"),
        ("nodes", f"{answer['nodes']} ({answer['blockedNodes']} take no new pods)"),
        ("gpus", _counts(answer["gpus"])),
        ("claims", _counts(answer["claims"])),
        ("pods", f"{answer['podsBound']} bound, {answer['podsWaiting']} waiting"),
        ("agents", _agents(answer["agents"])),
        ("poll", f"every {slurm['pollIntervalSeconds']} s, costs {slurm['pollCostSeconds']} s"),
    ]
    if outside := answer["gpuNodesOutside"]:
        text = ", ".join(outside[:5]) + (", ..." if len(outside) > 5 else "")
        text += ": no Slurm node is called so; where one is the same machine, see pool.names"
        rows.append(("GPU nodes outside", text))
    if slurm["error"]:
        rows.append(("error", slurm["error"]))
    if answer["breaker"]["open"]:
        rows.append(("breaker", f"OPEN: {len(answer['breaker']['lost'])} claims lost at once"))
    for group in answer["groups"]:
        text = f"{group['pods']} of at most {group['podsMost']} GPUs, Slurm jobs {group['native']}"
        text += f", of {group['gpus']}" + "".join(f"; OVER: {side}" for side in group["over"])
        rows.append((f"group {group['name']}", f"pods {text}"))
    if answer["nodeSync"]["drained"]:
        rows.append(("drained", f"by us in Slurm: {', '.join(answer['nodeSync']['drained'][:10])}"))
    if answer["nodeSync"]["held"]:
        text = f"{len(answer['nodeSync']['held'])} nodes; too many are not Ready at once"
        rows.append(("drains held", text))
    if ends := answer["completing"]["jobs"]:
        text = (
            f"{answer['completing']['nodes']} for up to {answer['completing']['longestSeconds']} s"
        )
        rows.append(("COMPLETING", f"{text}: jobs {', '.join(map(str, ends[:10]))}"))
    rows += [("set aside", f"{a['kind']} {a['ref']}: {a['error']}") for a in answer["setAside"]]
    rows += [("conflict", text) for text in answer["conflicts"]]
    for name, value in rows:
        print(f"{name:<9} {value}")
    return OK


def _agents(answer: dict[str, Any]) -> str:
    words = _counts({word: answer[word] for word in ("ready", "closed", "silent", "absent")})
    found = _counts(answer["findings"])
    needed = "" if answer["needed"] else ", not needed"
    return words + needed + ("" if found == "none" else f"; findings: {found}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n) or "none"


def _who(args: argparse.Namespace) -> int:
    answer = _ask(args, "who", node=args.node)
    if args.output == "json":
        _print_json(answer)
        return OK
    print(
        f"{answer['slurmNode']} ({answer['kubeNode'] or 'no Kubernetes node'}): {answer['state']}"
    )
    if answer["blocked"]:
        print(f"takes no new pods: {answer['blocked']} {answer['reason']}".rstrip())
    agent = answer["agent"]
    if agent is not None:
        word = agent["why"] or "ready"
        print(f"agent: {word}, looked {agent['ageSeconds']} s ago")
        for finding in agent["findings"]:
            print(f"agent finds {finding['kind']}: {finding['text']}")
    print(f"{'GPU':>4} {'TYPE':<12} {'STATE':<10} {'JOB':>9} {'USER':<12} POD")
    for gpu in answer["gpus"]:
        index = gpu["gpu"] if answer["numbered"] else "-"
        job, user, pod = gpu["jobId"] or "", gpu["user"] or "", gpu["pod"] or ""
        print(
            f"{index:>4} {gpu['type']:<12} {gpu['state']:<10} {job:>9} {user!s:<12} {pod}".rstrip()
        )
    for text in answer["conflicts"]:
        print(f"conflict: {text}")
    return OK


def _explain(args: argparse.Namespace) -> int:
    namespace, _, name = args.pod.rpartition("/")
    answer = _ask(args, "explain", namespace=namespace or "default", name=name)
    if args.output == "json":
        _print_json(answer)
        return OK
    asks = answer["asks"]
    where = f"on {answer['node']}" if answer["node"] else "not bound"
    print(f"{answer['pod']}: {answer['phase']}, {where}; asks {asks['gpus']} GPUs")
    claim = answer["claim"]
    if claim is not None:
        why = f" ({claim['why']})" if claim["why"] else ""
        print(f"claim: {claim['phase']}, Slurm job {claim['jobId']}, GPUs {claim['gpus']}{why}")
    if answer["reason"]:
        print(f"reason: {answer['reason']}")
    waits = answer.get("waits")
    if waits is not None:
        print(f"waits: {waits['text']}")
        for group in waits["nodes"].values():
            examples = ", ".join(group["examples"])
            print(f"  {group['count']:>5} nodes: {group['text']} (e.g. {examples})")
    if (group := answer.get("group")) is not None and group["planned"]:
        _print_gang(group)
    return OK


def _print_gang(gang: dict[str, Any]) -> None:
    print(f"group {gang['name']} ({gang['kind']}), {gang['size'] or 'an unknown number of'} pods")
    for word in ("topology", "segment"):
        if gang[word]:
            print(f"  {word}: {gang[word]}")
    if gang["waits"]:
        print(f"  waits: {gang['waits']}")
    if (job := gang["slurmJob"]) is not None:
        print(f"  Slurm job {job['jobId']}: {job['state']}, for all members")
    if gang["whyNotNow"]:
        print(f"  why not now: {gang['whyNotNow']}")
    if gang["level"]:
        spread = "".join(f", {n} {level}s" for level, n in gang["spread"].items())
        print(f"  in one {gang['level']}: {gang['domain']}{spread}")
    for text in gang["whyNotLower"]:
        print(f"  why not lower: {text}")
    for row in gang["members"]:
        claim = f"{row['claim']} {row['jobId'] or ''}".rstrip() if row["claim"] else "no claim"
        print(f"  {row['rank']:>5} {row['pod']:<40} {row['node'] or '-':<16} {claim}")


def _breaker(args: argparse.Namespace) -> int:
    answer = _ask(args, "breaker", answer=args.answer)
    if args.output == "json":
        _print_json(answer)
        return OK
    if args.answer != "show":
        print(f"said: {args.answer}")
        return OK
    state = (
        "OPEN: no pod is evicted until `slurmbridge breaker confirm`"
        if answer["open"]
        else "closed"
    )
    print(f"breaker {state}")
    for ref in answer["lost"]:
        print(f"  lost its claim: {ref}")
    return OK


def _print_json(value: Any) -> None:
    print(json.dumps(value, separators=(",", ":")))


if __name__ == "__main__":
    sys.exit(main())
