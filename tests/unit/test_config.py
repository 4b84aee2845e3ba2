"""The configuration file: strict, and every fault told with its path."""

import pytest

from slurmbridge.config import changed_sections, check_reload, load, parse
from slurmbridge.pool.errors import ConfigError
from slurmbridge.pool.policy import Granularity

GOOD = b"apiVersion: slurmbridge.dev/v1\npolicy: {cluster: a}\n"

FAULTS = {
    "unknown key in the policy": (
        b"policy: {cluster: a, granlarity: gpu}",
        {"$.policy.granlarity": "unknown key"},
    ),
    "wrong type deep inside": (
        b"policy: {cluster: a}\nslurm: {poll: {budget: lots}}",
        {"$.slurm.poll.budget": "expected"},
    ),
    "number out of range": (
        b"policy: {cluster: a, candidates: 0}",
        {"$.policy.candidates": ">= 1"},
    ),
    "missing key": (b"policy: {}", {"$.policy.cluster": "is required"}),
    "half a certificate": (
        b"policy: {cluster: a}\nlink: {tls: {cert: x}}",
        {"$.link.tls.key": "is required", "$.link.tls.clientCa": "is required"},
    ),
    "nodes' authority without saying who may ask for claims": (
        b"policy: {cluster: a}\nlink: {nodeCa: x, tls: {cert: x, key: x, clientCa: x}}",
        {"$.link.nodeCa": "needs tls, and clients"},
    ),
    "unknown word": (
        b"policy: {cluster: a, granularity: core}",
        {"$.policy.granularity": "core"},
    ),
    "faults in a list, each with its place": (
        b"policy: {cluster: a, identities: [{namespaces: [x], accounts: [1]}, {accounts: [y]}]}",
        {
            "$.policy.identities[0].accounts[0]": "expected `str`",
            "$.policy.identities[1].namespaces": "is required",
        },
    ),
    "cluster id that Slurm could not carry": (
        b"policy: {cluster: 'a b'}",
        {"$.policy.cluster": "a-z"},
    ),
    "account that would be an option": (
        b"policy: {cluster: a, identities: [{namespaces: [x], accounts: [--uid=0]}]}",
        {"$.policy.identities[0].accounts[0]": "not a Slurm name"},
    ),
    "resource without a domain": (
        b"policy: {cluster: a, resources: {gpu: ''}}",
        {"$.policy.resources.gpu": "no domain"},
    ),
    "address without a port": (
        b"policy: {cluster: a}\nadmin: {listen: localhost}",
        {"$.admin.listen": "host:port"},
    ),
    "lease that one lost renewal would cost": (
        b"policy: {cluster: a}\nkube: {lease: {durationS: 4, renewS: 2}}",
        {"$.kube.lease.renewS": "half"},
    ),
}


@pytest.mark.parametrize(("text", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_told_with_its_path(text, expected):
    with pytest.raises(ConfigError) as caught:
        parse(b"apiVersion: slurmbridge.dev/v1\n" + text)
    told = {problem.path: problem.text for problem in caught.value.problems}
    assert told.keys() == expected.keys()
    for path, part in expected.items():
        assert part in told[path]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"a: [", "line 1"),
        (b"- 1\n", "mapping"),
        (b"", "mapping"),
        (b"a: 1\na: 2\n", "given twice"),
        (b"? [x]\n: 1\n", "must be a text"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"apiVersion: slurmbridge.dev/v2\npolicy: {cluster: a}", "v2"),
        (b"x" * (1 << 20 | 1), "larger than 1 MiB"),
        (b"!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_text_that_is_no_configuration_is_refused(text, part):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert part in str(caught.value)


def test_another_resource_needs_no_word_about_agents_that_are_not_used():
    text = b"apiVersion: slurmbridge.dev/v1\npolicy: {cluster: a, resources: {amd.com/gpu: ''}}\n"
    assert dict(parse(text).policy.resources) == {"amd.com/gpu": ""}
    with pytest.raises(ConfigError, match=r"\$.node.resource"):
        parse(text + b"node: {devices: nvml, name: gpu1}\n")


def test_defaults_are_safe():
    config = parse(GOOD)
    assert config.policy.granularity is Granularity.NODE
    assert config.link.listen.startswith("127.0.0.1:")
    assert config.slurm.poll.budget == 0.05
    assert config.settings(owner_uid=7).owner_uid == 7


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load(str(tmp_path / "missing.yaml"))


def test_a_reload_says_what_needs_a_restart_and_never_changes_the_cluster():
    old = parse(GOOD)
    new = parse(GOOD + b"slurm: {concurrency: 8}\nrules: {holdS: 30}\n")
    assert changed_sections(old, new) == ["slurm"]
    check_reload(old, new)
    with pytest.raises(ConfigError, match=r"\$.policy.cluster"):
        check_reload(old, parse(GOOD.replace(b"cluster: a", b"cluster: b")))
