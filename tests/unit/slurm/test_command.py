import asyncio
import os
import time

import pytest

from slurmbridge.pool.errors import (
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)
from slurmbridge.slurm.command import CommandResult, SlurmCommand, clean_environment, failure_of


@pytest.fixture
async def command():
    made = SlurmCommand(environ={"PATH": os.environ["PATH"]}, max_output=100_000)
    yield made
    made.close()


def sh(script, *args):
    return ["sh", "-c", script, "sh", *args]


async def test_output_errors_and_arguments_come_back_as_they_are(command):
    done = await command.run(sh('printf "%s" "$1"; echo oops >&2', "a b\n'$(id)"), timeout_s=5)
    assert (done.stdout, done.stderr, done.code) == ("a b\n'$(id)", "oops\n", 0)


async def test_bytes_that_are_no_text_can_still_be_logged(command):
    done = await command.run(sh(r"printf '\377ok\303\251'"), timeout_s=5)
    assert done.stdout == "\\xffoké"
    assert done.stdout.encode()


async def test_input_larger_than_a_pipe_reaches_the_command(command):
    done = await command.run(["wc", "-c"], timeout_s=5, stdin="x" * 1_000_000)
    assert done.stdout.strip() == "1000000"


async def test_a_command_that_does_not_read_its_input_is_no_fault(command):
    done = await command.run(["true"], timeout_s=5, stdin="x" * 1_000_000)
    assert done.code == 0


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def ends(pid):
    async with asyncio.timeout(20):
        while is_alive(pid):
            await asyncio.sleep(0.01)


async def test_the_deadline_ends_the_command_and_its_children(command, tmp_path):
    async with asyncio.timeout(30):
        with pytest.raises(PeerTimeout):
            await command.run(sh(f"sleep 600 & echo $! > {tmp_path}/pid; wait"), timeout_s=1)
    await ends(int((tmp_path / "pid").read_text()))


async def test_a_command_that_ignores_sigterm_is_killed(command, monkeypatch):
    monkeypatch.setattr("slurmbridge.slurm.command.GRACE_S", 0.1)
    async with asyncio.timeout(30):
        with pytest.raises(PeerTimeout):
            await command.run(sh("trap '' TERM; while :; do sleep 0.02; done"), timeout_s=0.1)


async def test_a_command_that_closes_its_output_and_lives_on_meets_the_deadline(command):
    with pytest.raises(PeerTimeout):
        await command.run(sh("exec >&- 2>&-; exec sleep 60"), timeout_s=0.1)


async def test_endless_output_is_cut_off(command):
    with pytest.raises(PeerProtocolError, match="more than 100000 bytes"):
        await command.run(["yes"], timeout_s=5)


async def test_endless_errors_are_read_and_dropped(command):
    done = await command.run(sh("head -c 3000000 /dev/zero >&2; echo done"), timeout_s=5)
    assert done.stdout == "done\n"
    assert len(done.stderr) <= 1024 * 1024


async def test_cancelling_the_caller_ends_the_command(command, tmp_path):
    task = asyncio.create_task(command.run(sh(f"echo $$ > {tmp_path}/pid; sleep 60"), timeout_s=60))
    while not (tmp_path / "pid").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ends(int((tmp_path / "pid").read_text()))


async def test_no_more_than_so_many_commands_run_at_a_time():
    command = SlurmCommand(concurrency=2)
    begun = time.monotonic()
    await asyncio.gather(*(command.run(["sleep", "0.1"], timeout_s=5) for _ in range(4)))
    assert time.monotonic() - begun >= 0.2
    command.close()


async def test_waiting_for_a_slot_counts_towards_the_deadline(tmp_path):
    command = SlurmCommand(concurrency=1)
    held = sh('until [ -e "$1" ]; do sleep 0.01; done', str(tmp_path / "end"))
    first = asyncio.create_task(command.run(held, timeout_s=60))
    await asyncio.sleep(0)
    with pytest.raises(PeerUnavailable, match="no free slot"):
        await command.run(["true"], timeout_s=0.05)
    (tmp_path / "end").touch()
    assert (await first).code == 0
    command.close()


async def test_the_childs_own_work_is_told_from_waiting(command):
    work = sh("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    busy = await command.run(work, timeout_s=60)
    idle = await command.run(["sleep", "0.2"], timeout_s=60)
    assert idle.cpu_s < busy.cpu_s
    assert idle.cpu_s < 0.15 <= idle.cost_s


async def test_a_command_that_is_not_installed_is_no_answer(command):
    with pytest.raises(PeerUnavailable, match="cannot run"):
        await command.run(["no-such-command-of-slurm"], timeout_s=5)


async def test_what_is_asked_after_the_end_of_a_term_gets_no_answer(command):
    command.close()
    with pytest.raises(PeerUnavailable, match="after shutdown"):
        await command.run(["true"], timeout_s=5)


async def test_a_folder_of_commands_is_used_instead_of_the_path(tmp_path):
    tool = tmp_path / "squeue"
    tool.write_text("#!/bin/sh\necho mine\n")
    tool.chmod(0o755)
    command = SlurmCommand(folder=str(tmp_path))
    assert (await command.run(["squeue"], timeout_s=5)).stdout == "mine\n"
    command.close()


async def test_a_failed_command_raises_unless_asked_not_to(command):
    with pytest.raises(PeerRejected) as caught:
        await command.run(sh("echo 'error: Requested nodes are busy' >&2; exit 1"), timeout_s=5)
    assert caught.value.reason == "busy"
    done = await command.run(sh("exit 3"), timeout_s=5, check=False)
    assert done.code == 3


def test_the_callers_variables_do_not_reach_slurms_commands():
    dirty = {
        "PATH": "/bin",
        "HOME": "/home/ann",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_JWT": "secret",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "R",
        "SCONTROL_ALL": "0",
        "SALLOC_PARTITION": "x",
        "SBATCH_ACCOUNT": "y",
        "TZ": "Europe/Berlin",
        "LC_ALL": "de_DE.UTF-8",
    }
    assert clean_environment(dirty, "/tmp/slurm.conf") == {
        "PATH": "/bin",
        "HOME": "/home/ann",
        "SLURM_CONF": "/tmp/slurm.conf",
        "SLURM_TIME_FORMAT": "standard",
        "SLURM_BITSTR_LEN": "65536",
        "TERM": "dumb",
        "TZ": "UTC",
        "LC_ALL": "C",
    }
    assert clean_environment(dirty, "")["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert "SLURM_CONF" not in clean_environment({}, "")


NO_ANSWER = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "squeue: error: Unable to contact slurm controller (send failure)",
    "slurm_load_node error: Socket timed out on send/recv operation",
    "slurm_load_jobs error: Zero Bytes were transmitted or received",
    "slurm_load_jobs error: Slurm backup controller in standby mode",
    "Controller is in standby mode, try a different controller",
    "slurm_load_partitions: Protocol authentication error",
    "sinfo: error: If munged is up, restart with --num-threads=10",
    'squeue: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"',
    "slurm_load_jobs error: Invalid authentication credential",
    "slurm_load_jobs error: Incompatible versions of client and server code",
    "squeue: fatal: Unable to process configuration file",
    "squeue: error: s_p_parse_file: cannot stat file /x: No such file or directory, retrying in 1sec",
    "scontrol: error: fetch_config: DNS SRV lookup failed",
    "salloc: error: Job submit/allocate failed: Unable to contact slurm controller (connect failure)",
    "salloc: error: Job submit/allocate failed: Socket timed out on send/recv operation",
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    "slurm_load_jobs error: Slurm internal error, contact system administrator",
    "scontrol: error: Connection refused",
]


@pytest.mark.parametrize("text", NO_ANSWER)
def test_no_answer_is_never_a_no(text):
    error = failure_of("squeue", CommandResult("", text, 1, 0.1, 0.0))
    assert isinstance(error, PeerUnavailable)
    assert not isinstance(error, PeerProtocolError)


A_NO = {
    "salloc: error: Unable to allocate resources: Requested nodes are busy": "busy",
    "salloc: error: Job submit/allocate failed: Immediate execution impossible, insufficient priority": "priority",
    "slurm_load_jobs error: Invalid job id specified": "identity",
    "scontrol: error: Job/step already completing or completed": "completing",
    "salloc: error: Job submit/allocate failed: A new refusal of a later Slurm": "other",
}


@pytest.mark.parametrize(("text", "reason"), A_NO.items())
def test_a_no_has_a_word_for_its_reason(text, reason):
    error = failure_of("salloc", CommandResult("", text, 1, 0.1, 0.0))
    assert isinstance(error, PeerRejected)
    assert error.reason == reason


def test_what_is_not_there_is_a_no_that_scontrol_prints_on_stdout():
    error = failure_of("scontrol", CommandResult("Node gpu77 not found\n", "", 1, 0.1, 0.0))
    assert isinstance(error, PeerRejected)
    assert error.reason == "not_found"


@pytest.mark.parametrize("text", ["", "something new went wrong", "Segmentation fault"])
def test_a_failure_in_unknown_words_is_no_answer(text):
    assert isinstance(failure_of("x", CommandResult("", text, 1, 0.1, 0.0)), PeerProtocolError)


def test_a_command_killed_by_someone_else_is_no_answer():
    error = failure_of("x", CommandResult("half a list", "", -9, 0.1, 0.0))
    assert isinstance(error, PeerUnavailable)
