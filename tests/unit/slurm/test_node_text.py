import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import GpuCount, GpuUse, NodeState
from slurmbridge.slurm.text import (
    read_config,
    read_nodes,
    read_partitions,
    read_reservations,
    read_settings,
)

NODE = (
    "NodeName=gpu001 Arch=x86_64 CoresPerSocket=32  CPUAlloc=4 CPUEfctv=62 CPUTot=64 CPULoad=1.30"
    " AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:a100:8(S:0,1) GresDrain=N/A"
    " GresUsed=gpu:a100:2(IDX:0,3) NodeAddr=10.0.0.1 NodeHostName=ip-10-0-0-1 Version=22.05.8"
    " OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC Debian 6.1.0-1  RealMemory=500000 AllocMem=1000"
    " FreeMem=N/A Sockets=2 Boards=1 State=MIXED+CLOUD ThreadsPerCore=1 TmpDisk=0 Weight=1"
    " Owner=N/A MCS_label=N/A Partitions=main,hid  BootTime=2026-11-30T15:07:21"
    " SlurmdStartTime=2026-11-30T15:18:00 CfgTRES=cpu=64,mem=500000M,billing=64 AllocTRES=cpu=4\n"
)


def node(**changes):
    text = NODE
    for key, value in changes.items():
        old = next(word for word in NODE.split() if word.startswith(key + "="))
        text = text.replace(old, value if value == "" else f"{key}={value}")
    (only,) = read_nodes(text).values()
    return only


def test_a_node_is_read_whole():
    read = node()
    assert (read.name, read.address, read.hostname) == ("gpu001", "10.0.0.1", "ip-10-0-0-1")
    assert read.state == NodeState("MIXED", frozenset({"CLOUD"}))
    assert (read.cpus_total, read.cpus_used) == (62, 4)
    assert (read.memory_mib, read.memory_used_mib) == (500000, 1000)
    assert read.gpus == (GpuCount("a100", 8),)
    assert read.gpus_used == GpuUse((GpuCount("a100", 2),), (0, 3))
    assert (read.partitions, read.reason, read.fault) == (("main", "hid"), "", "")
    assert read.boot_time == 1796051241


def test_the_form_with_many_lines_and_odd_indents_is_read():
    text = NODE.replace("  CPUAlloc", "\n   CPUAlloc").replace(" State", "\n  State")
    read = read_nodes(text + "\n " + text.replace("gpu001", "gpu002"))
    assert list(read) == ["gpu001", "gpu002"]
    assert read["gpu001"] == node()


def test_a_node_that_says_the_same_as_in_the_last_listing_is_the_same_record():
    other, busy = NODE.replace("gpu001", "gpu002"), NODE.replace("CPUAlloc=4", "CPUAlloc=5")
    known = {}
    first = read_nodes(NODE + other, known=known)
    second = read_nodes(busy + other, known=known)
    assert second["gpu002"] is first["gpu002"]
    assert (first["gpu001"].cpus_used, second["gpu001"].cpus_used) == (4, 5)
    assert second == read_nodes(busy + other)
    with pytest.raises(ParseError):
        read_nodes(busy + busy, known=known)
    assert len(known) == 2, "texts of nodes that are gone are kept, or of a listing that is refused"
    assert read_nodes(other, known=known) == {"gpu002": first["gpu002"]}
    assert len(known) == 1


UNKNOWN = {
    "no GresUsed (no -d)": {"GresUsed": ""},
    "GresUsed says nothing of GPUs": {"GresUsed": "GresUsed=lscratch:0"},
    "GresUsed contradicts itself": {"GresUsed": "gpu:a100:2(IDX:0)"},
    "whole GPUs and shards": {"GresUsed": "gpu:a100:1(IDX:0),shard:2(IDX:0)"},
    "more used than there are": {"GresUsed": "gpu:a100:9(IDX:0-8)"},
    "GresUsed cut": {"GresUsed": "gpu:a100:2(IDX:0,"},
}


@pytest.mark.parametrize("changes", UNKNOWN.values(), ids=UNKNOWN)
def test_use_that_is_not_surely_known_is_unknown_and_spoils_no_listing(changes):
    read = node(**changes)
    assert read.gpus_used is None
    assert read.gpu_total == 8


def test_a_fault_is_told():
    assert "GresUsed" in node(GresUsed="gpu:a100:9(IDX:0-8)").fault
    assert "indices" in node(GresUsed="gpu:a100:2(IDX:0)").fault
    assert node(State="IDLE+MIXED").state == NodeState("UNKNOWN")
    assert node(State="IDLE+MIXED").fault != ""


@pytest.mark.parametrize("gres", ["(null)", "justarandomfield", "gpu:a100:no_consume:8", "gpu:h10"])
def test_a_node_whose_gres_hold_no_gpu_has_none_to_give(gres):
    read = node(Gres=gres)
    assert read.gpus == ()
    assert (read.gpus_used is None) is bool(read.fault)


def test_the_tres_of_a_node_are_no_evidence_of_gpus():
    read = node(Gres="(null)", GresUsed="gpu:0", CfgTRES="cpu=64,gres/gpu=8")
    assert (read.gpus, read.gpus_used) == ((), GpuUse())


REASONS = {
    "Reason=disk [root@2023-01-26T10:11:39]": "disk [root@2023-01-26T10:11:39]",
    "Reason=a State=IDLE Gres=gpu:99 reason": "a State=IDLE Gres=gpu:99 reason",
    "Reason=x Comment=Reason=y": "x",
    "Reason=x ReservationName=root_5": "x",
    "Comment=some comment Gres=gpu:64": "",
    'Comment={"a":"State=DOWN"} Extra=x Reason=z': "z",
    "Reason=(null)": "",
}


@pytest.mark.parametrize(("tail", "reason"), REASONS.items())
def test_free_text_of_operators_changes_nothing(tail, reason):
    (read,) = read_nodes(NODE.rstrip() + " " + tail + "\n").values()
    assert read.reason == reason
    assert (read.gpus, read.state.base) == ((GpuCount("a100", 8),), "MIXED")


def test_times_of_the_listing_are_of_its_zone():
    assert node(BootTime="None").boot_time is None


NO_NODES = {
    "nothing": "",
    "no nodes": "No nodes in the system\n",
    "an error": "slurm_load_node error: Unable to contact slurm controller (connect failure)\n",
    "an error before": "slurm_load_node: something\n" + NODE,
    "twice": NODE + NODE,
    "cut before its state": NODE[:400],
    "cut in its state": NODE[: NODE.index("+CLOUD")],
    "cut in the second": NODE + NODE.replace("gpu001", "gpu002")[:250],
    "name only": "NodeName=gpu001\n",
    "a separator of another tool": NODE + "######\n" + "NodeName=gpu002\nState=IDLE\n",
    "no number": NODE.replace("CPUAlloc=4", "CPUAlloc=x"),
}


@pytest.mark.parametrize("text", NO_NODES.values(), ids=NO_NODES)
def test_what_is_not_a_whole_listing_of_nodes_is_refused(text):
    with pytest.raises(ParseError):
        read_nodes(text)


PARTITION = (
    "PartitionName=long AllowGroups=ALL AllowAccounts=a,b AllowQos=ALL AllocNodes=ALL Default=YES"
    " QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=600 Hidden=NO"
    " MaxNodes=UNLIMITED MaxTime=3-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED"
    " Nodes=node[0201-0272,1069-2468],x PriorityJobFactor=10 PriorityTier=25 RootOnly=NO ReqResv=NO"
    " OverSubscribe=EXCLUSIVE OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=251200"
    " TotalNodes=1473 SelectTypeParameters=NONE TRES=cpu=1,gres/gpu=2\n"
)


def test_a_partition_is_read():
    (read,) = read_partitions(PARTITION).values()
    assert (read.name, read.state, len(read.nodes), read.max_time_min) == ("long", "UP", 1473, 4320)
    assert (read.allow_accounts, read.allow_qos) == (("a", "b"), None)
    assert (read.priority_tier, read.preempt_mode, read.exclusive) == (25, "REQUEUE", True)


@pytest.mark.parametrize(
    "text",
    ["", "slurm_load_partitions error: x\n", PARTITION * 2, PARTITION[:300], "No partitions\n"],
)
def test_what_is_not_a_whole_listing_of_partitions_is_refused(text):
    with pytest.raises(ParseError):
        read_partitions(text)


def reservation(name="maint", start="2027-01-04T08:00:00", end="2027-01-05T08:00:00", **more):
    values = {"Nodes": "gpu[001-002]", "Flags": "MAINT,SPEC_NODES", "Users": "root"} | more
    return (
        f"ReservationName={name} StartTime={start} EndTime={end} Duration=1-00:00:00"
        f" Nodes={values['Nodes']} NodeCnt=2 CoreCnt=64 Features=(null) PartitionName=(null)"
        f" Flags={values['Flags']} TRES={values.get('TRES', 'cpu=64')} Users={values['Users']}"
        f" Groups={values.get('Groups', '(null)')} Accounts={values.get('Accounts', '(null)')}"
        " Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
    )


def test_a_reservation_is_read():
    (read,) = read_reservations(reservation())
    assert (read.name, read.nodes, read.users) == ("maint", ("gpu001", "gpu002"), ("root",))
    assert read.end - read.start == 86400
    assert (read.flags, read.state, read.tres) == ({"MAINT", "SPEC_NODES"}, "INACTIVE", "cpu=64")
    assert (read.accounts, read.groups, read.partition) == ((), (), "")


def test_names_with_spaces_and_names_that_come_twice_are_kept():
    text = reservation("SITE: weekend 2027") + reservation("hw") + reservation("hw")
    assert [r.name for r in read_reservations(text)] == ["SITE: weekend 2027", "hw", "hw"]


def test_empty_flags_lists_and_groups_are_read():
    text = reservation(Flags="", Users="-root", Groups="g1,g2", Accounts="a")
    (read,) = read_reservations(text)
    assert (read.flags, read.users) == (frozenset(), ("-root",))
    assert (read.groups, read.accounts) == (("g1", "g2"), ("a",))


def test_the_form_with_many_lines_and_core_lists_is_read():
    text = reservation().replace(" TRES", "\n     NodeName=gpu001 CoreIDs=0-3\n   TRES")
    text = text.replace(" Nodes=", "\n   Nodes=")
    (read,) = read_reservations(text + "\n")
    assert (read.flags, read.tres) == ({"MAINT", "SPEC_NODES"}, "cpu=64")


def test_epoch_times_are_read_and_relative_ones_name_the_remedy():
    (read,) = read_reservations(reservation(start="1781676000", end="1781697600"))
    assert (read.start, read.end) == (1781676000, 1781697600)
    for start in ("14:24:22", "4 Jun 08:00", "11 Apr 2026"):
        with pytest.raises(ParseError, match="SLURM_TIME_FORMAT=standard"):
            read_reservations(reservation(start=start))


def test_no_reservation_is_said_in_words_and_nothing_else_is_none():
    assert read_reservations("No reservations in the system\n") == ()
    for text in ("", "\n", "slurm_load_reservations error: x\n", reservation()[:100]):
        with pytest.raises(ParseError):
            read_reservations(text)


CONFIG = """Configuration data as of 2026-11-30T15:18:12
AuthInfo                = (null)
BOOT_TIME               = 2026-11-30T15:18:00
ClusterName             = lab
Epilog[0]               = /etc/slurm/epilog.sh
MinJobAge               = 90 sec
PreemptMode             = GANG,SUSPEND
PreemptType             = preempt/partition_prio
PriorityType            = priority/multifactor
SchedulerParameters     = bf_interval=5,defer
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY,CR_ONE_TASK_PER_CORE
SLURM_VERSION           = 24.11.5
SlurmUser               = slurm(64030)

Slurmctld(primary) at ctl is UP
"""


def test_the_configuration_is_read():
    read = read_config(CONFIG)
    assert (read.cluster, read.version, read.slurm_user) == ("lab", "24.11.5", "slurm")
    assert (read.min_job_age_s, read.boot_time) == (90, 1796051880)
    assert read.told_at == read.boot_time + 12
    assert read_config(CONFIG.replace("2026-11-30T15:18:12", "today")).told_at == 0
    assert read.scheduler_parameters == {"bf_interval=5", "defer"}
    assert (read.preempt_type, read.preempt_mode) == ("preempt/partition_prio", "GANG,SUSPEND")
    assert read.select_parameters == {"CR_CORE_MEMORY", "CR_ONE_TASK_PER_CORE"}
    settings = read_settings(CONFIG)
    assert (settings["AuthInfo"], settings["Epilog[0]"]) == ("", "/etc/slurm/epilog.sh")


@pytest.mark.parametrize("key", ["BOOT_TIME", "ClusterName", "SLURM_VERSION", "SelectType"])
def test_a_configuration_that_lacks_what_matters_is_refused(key):
    cut = "\n".join(row for row in CONFIG.splitlines() if not row.startswith(key + " "))
    with pytest.raises(ParseError, match=key):
        read_config(cut)
    with pytest.raises(ParseError):
        read_config("slurm_load_ctl_conf error: Unable to contact slurm controller\n")
