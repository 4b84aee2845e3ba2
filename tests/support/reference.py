"""Makes docs/config.md and docs/metrics.md from the code, so that they cannot fall behind it.

    python -m tests.support.reference            # write both
    python -m tests.support.reference --check    # exit 1 when a file is not what it would write

The configuration's keys, types, limits and defaults come from the structs, their meaning from the
structs' docstrings: a field is described by `name: text` (or `name, other: text`), at the beginning
of a line or after a sentence. A field that its docstring does not describe is an error.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec.inspect as types
from msgspec import NODEFAULT, to_builtins
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import extender.metrics as extender_metrics
import slurmbridge.metrics as bridge_metrics
from extender.app import Extender
from slurmbridge.clock import SystemClock
from slurmbridge.config import NEEDS_RESTART, Config
from slurmbridge.core.machine import Machine
from slurmbridge.core.settings import Settings
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.inventory import Usage
from slurmbridge.node.metrics import NodeCollector, NodeFigures
from slurmbridge.pool.policy import Policy

DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- Made by `make docs` from the code (tests/support/reference.py). Do not edit. -->"


class ReferenceProblem(RuntimeError):
    """The code does not say what the page needs."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    options = parser.parse_args(arguments)
    stale = [path for path, text in pages().items() if _read(path) != text]
    if options.check:
        for path in stale:
            print(f"{path.name} is not up to date: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(stale)} of {len(pages())} pages changed")
    return 0


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {DOCS / "config.md": config_page(), DOCS / "metrics.md": metrics_page()}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


# Configuration

CONFIG_INTRO = """\
The bridge reads one YAML file (`--config`, `SLURMBRIDGE_CONFIG`, or
`/etc/slurmbridge/config.yaml`); in the cluster it is the ConfigMap of
[manifests/base/config.yaml](../manifests/base/config.yaml). It is strict: an unknown key, a wrong
type, a key given twice or a value out of range is refused, with every problem and its path at once.
`slurmbridge check-config` checks a file and prints what would be in force, defaults included.

A changed file is read within seconds. If it is good it is taken, else the old one stays in force
and the problems are in the log and in the metric `slurmbridge_config_reloads_total{result="bad"}`.
The sections {restart} are read at the start only: after a change there,
restart the bridge. `policy.cluster` can never change while pods run, since it is the name of their
claims; a reload that changes it is refused.

The extender has no file: it gets the policy from the bridge, and its few options on its command
line (`slurmbridge-extender run --help`), among them its own ages `--stale-s` and `--blind-s`.

The smallest file:

```yaml
apiVersion: slurmbridge.dev/v1
policy:
  cluster: my-cluster
  partition: claims
```

Seconds may be fractions. "Slurm's default" means that the option is not given to Slurm at all.
"""


class Section(NamedTuple):
    """A struct of the configuration and where it stands (`policy.identities[]`)."""

    path: str
    kind: types.StructType


def config_page() -> str:
    """docs/config.md."""
    restart = ", ".join(f"`{name}`" for name in NEEDS_RESTART)
    lines = ["# Configuration", "", MARK, "", CONFIG_INTRO.replace("{restart}", restart)]
    for section in sections():
        lines += _section(section)
    return "\n".join(lines)


def sections() -> list[Section]:
    """All sections, outer ones first, in the order of the file."""
    root = types.type_info(Config)
    assert isinstance(root, types.StructType)
    return [Section("", root), *_below("", root)]


def _below(path: str, kind: types.StructType) -> Iterator[Section]:
    for field in kind.fields:
        inner, suffix = _struct_in(field.type)
        if inner is not None:
            here = f"{path}.{field.encode_name}".lstrip(".") + suffix
            yield Section(here, inner)
            yield from _below(here, inner)


def _struct_in(kind: types.Type) -> tuple[types.StructType | None, str]:
    if isinstance(kind, types.StructType):
        return kind, ""
    if isinstance(kind, types.VarTupleType) and isinstance(kind.item_type, types.StructType):
        return kind.item_type, "[]"
    if isinstance(kind, types.UnionType):
        for one in kind.types:
            if isinstance(one, types.StructType):
                return one, ""
    return None, ""


def _section(section: Section) -> list[str]:
    doc = inspect.getdoc(section.kind.cls) or ""
    told = descriptions(doc, [field.name for field in section.kind.fields], section.kind.cls)
    camel = {
        field.name: field.encode_name
        for each in sections()
        for field in each.kind.fields
        if "_" in field.name
    }
    lines = [f"## `{section.path}`" if section.path else "## The file", ""]
    lines += [_summary(doc), ""]
    if section.path.partition(".")[0] in NEEDS_RESTART:
        lines += ["Read at the start only.", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in section.kind.fields:
        text = re.sub(
            r"\w+", lambda m: f"`{camel[m[0]]}`" if m[0] in camel else m[0], told[field.name]
        )
        text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
        cells = (f"`{field.encode_name}`", type_text(field.type), default_text(field), text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _summary(doc: str) -> str:
    return " ".join(doc.partition("\n\n")[0].split())


def descriptions(doc: str, names: list[str], owner: type) -> dict[str, str]:
    """What a docstring says of each field.

    Raises:
        ReferenceProblem: it says nothing of one of them.

    """
    name = "|".join(sorted(names, key=len, reverse=True))
    head = re.compile(rf"(?:^|(?<=[.;)] )|(?<=\n))((?:{name})(?:, (?:{name}))*): ")
    body = " ".join(doc.partition("\n\n")[2].split())
    found: dict[str, str] = {}
    heads = list(head.finditer(body))
    for one, following in zip(heads, [*heads[1:], None], strict=True):
        text = body[one.end() : following.start() if following else len(body)].strip()
        for field in one[1].split(", "):
            found[field] = text[0].upper() + text[1:]
    missing = [field for field in names if field not in found]
    if missing:
        raise ReferenceProblem(f"the docstring of {owner.__name__} does not describe {missing}")
    return found


def type_text(kind: types.Type) -> str:
    """A type in the words of a YAML file."""
    match kind:
        case types.StrType():
            return "text"
        case types.BoolType():
            return "true or false"
        case types.IntType():
            return f"whole number{_range(kind)}"
        case types.FloatType():
            return f"number{_range(kind)}"
        case types.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case types.EnumType(cls=cls):
            return " or ".join(f"`{member.value}`" for member in cls)
        case types.DictType(key_type=key, value_type=value):
            return f"mapping of {type_text(key)} to {type_text(value)}"
        case types.VarTupleType(item_type=item):
            return f"list of {type_text(item)}"
        case types.StructType():
            return "section"
        case types.UnionType(types=choices):
            return " or ".join(type_text(choice) for choice in choices)
        case types.NoneType():
            return "null"
        case _:
            raise ReferenceProblem(f"no words for {kind!r}")


def _range(kind: types.IntType | types.FloatType) -> str:
    low = f"from {kind.ge:g}" if kind.ge is not None else ""
    low = f"above {kind.gt:g}" if kind.gt is not None else low
    high = f"to {kind.le:g}" if kind.le is not None else ""
    return "".join(f" {part}" for part in (low, high) if part)


def default_text(field: types.Field) -> str:
    """A default as YAML flow text."""
    if field.required:
        return "**required**"
    value = field.default
    if value is NODEFAULT:
        value = field.default_factory()
    if _struct_in(field.type)[0] is not None and value is not None and value != ():
        return "see below"
    return f"`{json.dumps(to_builtins(value))}`"


# Metrics

METRICS_INTRO = """\
All daemons serve Prometheus text on their admin port: the bridge on 8081, each extender and each
node agent on 8082 (`/metrics`). No label of bridge and extender holds a pod or a node, so the number
of their series does not grow with the cluster. What to alarm on: [operations.md](operations.md#alerts).
"""

BRIDGE_INTRO = """\
Counters and histograms count from the start of the process. Of the gauges only `slurmbridge_leader`
and `slurmbridge_events_waiting` exist on a replica that does not lead.
"""

EXTENDER_INTRO = """\
kube-scheduler has no latency metric per extender, so these are the only ones. A value that is not
known is absent, never 0.
"""


NODE_INTRO = """\
Each agent serves the series of its own node on the port of `node.listen`. One GPU has one owner:
`slurmbridge_node_gpu_owner` joins it by `uuid` to other exporters' series:
[node-agent.md](node-agent.md#audit-and-metrics). The four series of use exist where NVML tells them.
"""


class Metric(NamedTuple):
    """One family. labels: their names, with what they can be where that is a closed set."""

    name: str
    kind: str
    labels: str
    text: str


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = ["# Metrics", "", MARK, "", METRICS_INTRO, "## Bridge", "", BRIDGE_INTRO]
    lines += _metric_table(bridge())
    lines += ["", "## Extender", "", EXTENDER_INTRO]
    lines += _metric_table(of_extender())
    lines += ["", "## Node agent", "", NODE_INTRO]
    lines += _metric_table(of_node())
    return "\n".join([*lines, ""])


def _metric_table(metrics: list[Metric]) -> list[str]:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    return lines + [f"| `{m.name}` | {m.kind} | {m.labels} | {m.text} |" for m in metrics]


def bridge() -> list[Metric]:
    """Metrics of the bridge."""
    registry = CollectorRegistry()
    machine = Machine(Settings(policy=Policy(cluster="docs")), term="docs")
    gauges = bridge_metrics.PoolCollector(lambda: machine, lambda: 0)
    return [*_wrapped(bridge_metrics.Metrics(registry)), *_collected(gauges.collect)]


def of_extender() -> list[Metric]:
    """Metrics of the extender."""
    nobody: Any = _NoLink()
    gauges = extender_metrics.SightCollector(
        Extender(nobody, nobody, nobody, SystemClock(), token="docs")._gauges
    )
    own = extender_metrics.Metrics(CollectorRegistry())
    return [*_wrapped(own), *_collected(gauges.collect)]


def of_node() -> list[Metric]:
    """Metrics of the node agent, of a node that has everything."""
    gpu = Gpu(index=0, uuid="GPU-0", minor=0, path="/dev/nvidia0")
    figures = NodeFigures(
        devices=DeviceMap(gpus=(gpu,)),
        usage={"GPU-0": Usage((), 0, 0, 0, 0)},
    )
    return [
        Metric(
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            ", ".join(f"`{name}`" for name in family._labelnames),
            family.documentation,
        )
        for family in NodeCollector(lambda: figures).collect()
    ]


class _NoLink:
    """A link that knows nothing."""

    view = None
    policy = None
    leader = ""

    def age_s(self) -> float | None:
        return None


def _wrapped(owner: object) -> Iterator[Metric]:
    for metric in vars(owner).values():
        if isinstance(metric, MetricWrapperBase):
            suffix = "_total" if metric._type == "counter" else ""
            labels = ", ".join(f"`{name}`" for name in metric._labelnames)
            yield Metric(metric._name + suffix, str(metric._type), labels, metric._documentation)


def _collected(collect: Callable[[], Any]) -> Iterator[Metric]:
    for family in collect():
        values: dict[str, dict[str, None]] = {}
        for sample in family.samples:
            for name, value in sample.labels.items():
                values.setdefault(name, {})[value] = None
        yield Metric(family.name, family.type, _label_text(values), family.documentation)


def _label_text(values: Mapping[str, Mapping[str, None]]) -> str:
    return "; ".join(f"`{name}`: {', '.join(found)}" for name, found in values.items())


if __name__ == "__main__":
    sys.exit(main())
