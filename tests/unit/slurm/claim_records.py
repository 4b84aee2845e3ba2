"""Job records as `scontrol -o -d show job` prints them for claims."""

RECORD = (
    "JobId={id} JobName=slurmbridge-k1{sluid} UserId=root(0) GroupId=root(0) MCS_label=N/A"
    " Priority=4294967000 Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None"
    " Dependency=(null) Requeue=1 Restarts=0 BatchFlag=0 RunTime=00:00:00 TimeLimit=00:10:00"
    " SubmitTime=2026-11-30T16:08:56 EligibleTime=2026-11-30T16:08:56"
    " StartTime=2026-11-30T16:08:56 EndTime=2026-11-30T16:18:56 Partition=claims"
    " AllocNode:Sid=localhost:1 ReqNodeList=n1 ExcNodeList=(null) NodeList=n1 BatchHost=n1"
    " NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 CoreSpec=* JOB_GRES=gpu:a100:1"
    "   Nodes=n1 CPU_IDs=63 Mem=100 GRES=gpu:a100:1(IDX:{id}) MinCPUsNode=1 Features=(null)"
    " OverSubscribe=OK Command=(null) WorkDir=/ Comment={comment}{tail}\n"
)
CLAIM = "slurmbridge/1 cluster=k1 pod=u1 ref=ns/p1"


def record(job_id=1, comment=CLAIM, tail=" ", sluid=""):
    return RECORD.format(id=job_id, comment=comment, tail=tail, sluid=sluid)
