"""Several hosts on one machine: arguments, commands, the record, and a real lab if this is root."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_greco import lab
from hvd_greco.errors import ConfigError
from hvd_greco.lab import LabError, job, network, options, plan, state, system

RUN = "from hvd_greco.cli import main; main()"


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, "lab", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
        check=False,
    )


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [
        ("50mbit", 50_000_000, "50mbit"),
        ("1gbit", 10**9, "1gbit"),
        (" 1.5 GBit/s ", 1_500_000_000, "1.5gbit"),
        ("2500kbit", 2_500_000, "2.5mbit"),
        ("1234.567mbit", 1_234_567_000, "1234.567mbit"),
        ("100gbit", 10**11, "100gbit"),
        ("none", None, "none"),
        ("Unshaped", None, "none"),
    ],
)
def test_rates(text: str, bits: int | None, shown: str) -> None:
    rate = lab.parse_rate(text)
    assert rate.bits == bits
    assert lab.parse_rate(str(rate)) == rate
    if shown != "1234.567mbit":
        assert str(rate) == shown


@pytest.mark.parametrize(
    "text",
    ["", "50", "50mbps", "-1mbit", "1e3mbit", "999kbit", "101gbit", "0mbit", "nan", "1mbit;reboot",
     "١mbit", "1mbit\n2", "9999999999mbit", None, 5],
)  # fmt: skip
def test_bad_rates(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^rate: .*use "):
        lab.parse_rate(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 1}, "hosts: .*>= 2"),
        ({"hosts": 33}, "hosts: 33 .*2 to 32"),
        ({"hosts": True}, "hosts"),
        ({"slots": 0}, "slots"),
        ({"slots": 65}, "slots: 65 .*1 to 64"),
        ({"subnet": "10.0.0.1/24"}, "subnet: .*host bits"),
        ({"subnet": "nonsense"}, "subnet: 'nonsense' is no subnet"),
        ({"subnet": "8.8.8.0/24"}, "subnet: .*private"),
        ({"subnet": "127.0.0.0/24"}, "subnet: .*cannot carry hosts"),
        ({"subnet": "10.0.0.0/30", "hosts": 3}, "room for 2 hosts, and 3"),
        ({"subnet": "fd00::/64"}, "subnet"),
    ],
)
def test_bad_options(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.make_options(**arguments)


def test_a_subnet_in_use_is_refused() -> None:
    wanted = options.make_options().subnet
    network.check_free(wanted, [ipaddress.IPv4Network("192.168.0.0/16")])
    with pytest.raises(ConfigError, match=r"route to 10\.0\.0\.0/8; choose another"):
        network.check_free(wanted, [ipaddress.IPv4Network("10.0.0.0/8")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--hosts", "99"], "error: hosts: 99 is too many; use 2 to 32"),
        (["up", "--rate", "5mbps"], "error: rate: '5mbps' is no rate; use bits a second"),
        (["rate", "fast"], "error: rate: 'fast' is no rate"),
    ],
)
def test_errors_are_a_message(arguments: list[str], message: str) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for call in (lab.up, lab.down, lab.status, lab.measure, lambda: lab.run(["true"])):
        with pytest.raises(LabError, match="needs root"):
            call()


def test_missing_programs_name_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "_PATH", "/nonexistent")
    with pytest.raises(LabError, match=r"ip, tc, .*apt install hostname iproute2 mount util-linux"):
        lab.up()


# -- the commands --------------------------------------------------------------------------------


def test_the_commands_of_a_small_lab() -> None:
    commands = plan.up_commands(options.make_options(hosts=2, rate="100mbit"))
    lines = [" ".join(command) for command in commands]
    shape = "root tbf rate 100000000bit burst 6250b limit 631250b"
    assert lines[:3] == [
        "ip netns add grecosw",
        "ip -n grecosw link add grecobr type bridge",
        "ip -n grecosw link set grecobr up",
    ]
    assert lines[3:10] == [
        "ip netns add greco0",
        "ip -n greco0 link set lo up",
        "ip -n grecosw link add grecov0 type veth peer name eth0 netns greco0",
        "ip -n grecosw link set grecov0 master grecobr up",
        "ip -n greco0 address add 10.213.77.1/24 dev eth0",
        "ip -n greco0 link set eth0 up",
        "ip netns exec greco0 sh -c echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
    ]
    # Both ends of both links: what goes in is shaped as well as what goes out.
    assert lines[-4:] == [
        f"tc -n greco0 qdisc replace dev eth0 {shape}",
        f"tc -n greco1 qdisc replace dev eth0 {shape}",
        f"tc -n grecosw qdisc replace dev grecov0 {shape}",
        f"tc -n grecosw qdisc replace dev grecov1 {shape}",
    ]


@pytest.mark.parametrize("hosts", [2, 32])
def test_commands_touch_namespaces_of_ours_alone(hosts: int) -> None:
    chosen = options.make_options(hosts=hosts, rate="none")
    commands = plan.up_commands(chosen) + plan.down_commands(plan.namespaces(hosts))
    assert not any(command[0] == "tc" for command in commands)  # no rate, no queue
    for command in commands:
        where = command[3] if command[1] == "netns" else command[2]
        assert command[1] in ("netns", "-n")
        assert plan.OURS.fullmatch(where)
    assert len(set(chosen.addresses())) == hosts


def test_names_that_are_not_ours() -> None:
    for name in (
        "greco",
        "greco32",
        "greco00",
        "greco1 ",
        "grecoswx",
        "xgreco1",
        "greco-1",
        "greco١",
    ):
        assert not plan.OURS.fullmatch(name), name
    for name in plan.namespaces(32):
        assert plan.OURS.fullmatch(name), name


@pytest.mark.parametrize("rate", ["1mbit", "50mbit", "1gbit", "100gbit"])
def test_buckets_are_small_and_hold_what_tcp_hands_over(rate: str) -> None:
    parsed = lab.parse_rate(rate)
    assert parsed.bits is not None
    burst = plan.burst_bytes(parsed)
    assert 1_514 < plan.offload_bytes(parsed) <= burst
    assert burst <= max(4_096, parsed.bits / 8 * 0.001)


def test_mpirun_lines() -> None:
    chosen = options.make_options(hosts=3)
    five = job.mpirun_line("mpirun", 5, chosen, 3, ["python", "t.py"], Path("/run/x"))
    text = " ".join(five)
    assert "--prtemca plm_ssh_agent /run/x/agent" in text
    assert "--prtemca prte_if_include 10.213.77.0/24" in text
    assert "--mca btl self,sm,tcp --mca btl_tcp_if_include 10.213.77.0/24 python t.py" in text
    four = " ".join(job.mpirun_line("mpirun", 4, chosen, 3, ["python", "t.py"], Path("/run/x")))
    assert "--mca plm_rsh_agent /run/x/agent --mca oob_tcp_if_include 10.213.77.0/24" in four
    assert "self,vader,tcp" in four
    assert "prte" not in four


def test_versions_of_mpirun() -> None:
    assert job.mpi_major("mpirun (Open MPI) 5.0.11\n") == 5
    assert job.mpi_major("mpirun (Open MPI) 4.1.4\n\nReport bugs") == 4
    for text in ("", "HYDRA build details:\n Version: 4.0", "mpirun (Open MPI) 3.1.2"):
        with pytest.raises(LabError, match="Open MPI 4 or 5"):
            job.mpi_major(text)


def test_the_agent_does_as_ssh_does(tmp_path: Path) -> None:
    stubs = {
        "ip": 'echo "ip $3"; shift 3; exec "$@"',
        "unshare": 'shift; exec "$@"',
        "hostname": 'echo "hostname $1"',
        "mount": 'echo "mount $2 $3"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    programs = {name: str(tmp_path / name) for name in stubs}
    agent = tmp_path / "agent"
    agent.write_text(job.agent_text(programs, Path("/x y/hosts")))
    agent.chmod(0o755)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(agent), *words], capture_output=True, text=True, timeout=20, check=False
        )

    # Words are joined and given to one shell, so what is quoted for it is one word there.
    done = call("greco1", "X=1;", "printf '[%s]'", "'a b'", "$X", '"c  d"')
    *prelude, last = done.stdout.splitlines()
    assert prelude[0] == "ip greco1"
    assert prelude[1] == "hostname greco1"
    assert prelude[2:] in ([], ["mount /x y/hosts /etc/hosts"])
    assert last == "[a b][1][c  d]"
    assert call("greco1", "exit 7").returncode == 7
    for host in ("example.org", "greco1;true", "greco", "-o", "greco123"):
        refused = call(host, "true")
        assert refused.returncode == 255
        assert "no host of the lab" in refused.stderr


# -- the record, on a machine that is made up ----------------------------------------------------


class Machine:
    """Network namespaces that only this test has; the ``fail_at``-th command that changes fails."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.names = ["other"]
        self.fail_at = fail_at
        self.changes = 0

    def execute(self, command: plan.Command) -> str:
        if command[:3] == ("ip", "netns", "list"):
            return "".join(f"{name} (id: {i})\n" for i, name in enumerate(self.names))
        if command[:3] == ("ip", "netns", "pids") or "show" in command:
            return ""
        if command[:3] == ("ip", "netns", "delete"):
            self.names.remove(command[3])
            return ""
        self.changes += 1
        if self.changes == self.fail_at:
            raise KeyboardInterrupt
        if command[:3] == ("ip", "netns", "add"):
            assert command[3] not in self.names
            self.names.append(command[3])
        return ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(state, "FOLDER", tmp_path / "lab")
    monkeypatch.setattr(system, "check_needs", lambda: None)
    monkeypatch.setattr(system, "execute", lambda command: found.execute(command))
    monkeypatch.setattr(job, "find_program", lambda name: f"/sbin/{name}")
    return found


def test_up_status_rate_down(machine: Machine) -> None:
    made = lab.up(3, "200mbit", slots=2)
    assert made == state.read_state()
    assert (state.FOLDER / "agent").stat().st_mode & 0o777 == 0o755
    assert (state.FOLDER / "hostfile").read_text().splitlines()[2] == "greco2 slots=2"
    assert "10.213.77.3 greco2" in (state.FOLDER / "hosts").read_text()
    assert lab.status().whole
    assert lab.set_rate("50mbit").rate == "50mbit"
    assert lab.status().state == state.read_state() != made
    with pytest.raises(LabError, match=r"3 hosts at 50mbit is up.*--replace"):
        lab.up(2)
    assert lab.up(2, replace=True).hosts == 2
    assert machine.names == ["other", "grecosw", "greco0", "greco1"]
    with pytest.raises(
        ConfigError, match=r"np: 3 ranks do not fit 2 hosts of 1 slots; use up to 2"
    ):
        lab.run(["true"], np=3)
    with pytest.raises(ConfigError, match="command: is empty"):
        lab.run([])
    assert lab.down() == ["grecosw", "greco0", "greco1"]
    assert lab.down() == []
    assert machine.names == ["other"]
    assert [path.name for path in state.FOLDER.iterdir()] in ([], ["lock"])
    with pytest.raises(LabError, match="no lab is up: hvd-greco lab up"):
        lab.run(["true"])


def test_a_session_ends_with_an_error(machine: Machine) -> None:
    with pytest.raises(ZeroDivisionError), lab.session(hosts=2, rate="none"):
        raise ZeroDivisionError
    assert machine.changes == len(plan.up_commands(options.make_options(2, "none")))
    assert machine.names == ["other"]


@pytest.mark.parametrize("fail_at", range(1, 1 + len(plan.up_commands(options.make_options(2)))))
def test_what_was_made_goes_when_up_is_cut_short(machine: Machine, fail_at: int) -> None:
    machine.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        lab.up(2)
    assert machine.names == ["other"]
    assert state.read_state() is None


def test_up_cleans_up_after_one_that_was_killed(machine: Machine) -> None:
    chosen = options.make_options(3)
    lab.up(3)
    state.write_state(state.make_state(chosen, ready=False))
    machine.names.remove("greco2")
    assert not lab.status().whole
    with pytest.raises(LabError, match="not whole: namespaces greco2 are gone"):
        lab.run(["true"])
    lab.up(2)
    assert machine.names == ["other", "grecosw", "greco0", "greco1"]


def test_namespaces_that_nobody_recorded(machine: Machine) -> None:
    machine.names += ["greco1", "greco77"]
    with pytest.raises(LabError, match="namespaces greco1 bear names of ours, and no lab"):
        lab.up(2)
    assert lab.status().strays == ("greco1",)
    assert lab.down() == ["greco1"]
    assert machine.names == ["other", "greco77"]


GOOD = {
    "hosts": 2, "rate": "1gbit", "slots": 1, "subnet": "10.213.77.0/24",
    "made": ["grecosw", "greco0", "greco1"], "ready": True, "schema": 1,
}  # fmt: skip
HOSTILE = [
    b"",
    b"\x00\xff",
    b"[]",
    b"{}",
    b"[" * 5000,
    *(
        json.dumps({**GOOD, **change}).encode()
        for change in (
            {"hosts": 10**9},
            {"hosts": "2"},
            {"hosts": 3},
            {"slots": 0},
            {"rate": "1gbit; reboot"},
            {"rate": "x" * 10_000},
            {"subnet": "8.8.8.0/24"},
            {"subnet": "10.213.77.0/31"},
            {"made": ["other"]},
            {"made": ["grecosw", "greco0", "../greco1"]},
            {"made": ["grecosw", "greco0", "greco1", "greco1"]},
            {"made": ["greco0"] * 100_000},
            {"ready": 1},
            {"schema": 2},
            {"extra": 1},
        )
    ),
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_record(machine: Machine, content: bytes) -> None:
    state.prepare_folder()
    state.path().write_bytes(content)
    machine.names += ["greco1", "greco1x"]
    for call in (lab.status, lab.up, lambda: lab.run(["true"]), lambda: lab.set_rate("1gbit")):
        with pytest.raises(LabError, match=r"is no record of a lab .*lab down"):
            call()
    assert lab.down() == ["greco1"]
    assert machine.names == ["other", "greco1x"]
    assert not state.path().exists()


def test_a_good_record_is_read(machine: Machine) -> None:
    state.prepare_folder()
    state.path().write_text(json.dumps(GOOD))
    found = state.read_state()
    assert found is not None
    assert found.options() == options.make_options(2, "1gbit")


def test_a_folder_that_others_write_into_is_refused(machine: Machine) -> None:
    state.FOLDER.mkdir()
    state.FOLDER.chmod(0o777)
    with pytest.raises(LabError, match="run as root"):
        lab.up(2)
    assert machine.names == ["other"]


# -- a real lab ----------------------------------------------------------------------------------

_TRIAL = (
    "ip link add name b type bridge && ip link add v type veth peer name w && "
    "tc qdisc add dev lo root tbf rate 1mbit burst 4kb limit 64kb"
)


@pytest.fixture
def real() -> Iterator[None]:
    """A machine that can hold a lab, and holds none."""
    try:
        system.check_needs()
    except LabError as error:
        pytest.skip(str(error))
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", _TRIAL],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if trial.returncode:
        pytest.skip(f"no network namespaces, veth, bridge or tbf here: {trial.stderr.strip()}")
    found = lab.status()
    if found.state is not None or found.strays:
        pytest.skip("a lab is up on this machine")
    yield
    lab.down()


PROGRAM = """
import json, os, socket, sys, time
import torch
import horovod.torch as hvd

hvd.init()
block = torch.ones(1 << 20)
times = []
for _ in range(4):
    hvd.allreduce(torch.zeros(1), name="start")
    start = time.perf_counter()
    total = hvd.allreduce(block, name="block", op=hvd.Sum)
    times.append(time.perf_counter() - start)
assert bool((total == hvd.size()).all())
facts = [socket.gethostname(), socket.gethostbyname(socket.gethostname()), hvd.local_size(),
         hvd.cross_size(), os.environ["OMP_NUM_THREADS"], os.environ["LAB_TEST"], min(times)]
with open(f"{sys.argv[1]}/{hvd.rank()}", "w") as file:
    json.dump(facts, file)
hvd.shutdown()
sys.exit(5 if len(sys.argv) > 2 else 0)
"""


def _nothing_of_ours() -> bool:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True)
    return plan.PREFIX not in names.stdout + links.stdout


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_horovod_on_two_hosts(real: None, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(PROGRAM))
    with lab.session(hosts=2, rate="100mbit"):
        found = lab.measure()
        # Payload alone: headers take 5 %.
        assert 75 < found.bandwidth_mbit < 100
        assert 0 < found.latency_us < 5_000
        done = lab.run(
            [sys.executable, str(script), str(tmp_path)],
            timeout=60,
            env={"LAB_TEST": "a b"},
            capture=True,
        )
        assert done.returncode == 0, done.stdout
        ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
        threads = os.environ.get("OMP_NUM_THREADS") or str(
            max(1, len(os.sched_getaffinity(0)) // 2)
        )
        for rank, facts in enumerate(ranks):
            assert facts[:6] == [f"greco{rank}", f"10.213.77.{rank + 1}", 1, 2, threads, "a b"]
            # Every rank must send and receive all 4 MB, at 100 Mbit/s; less what the buckets hold.
            assert facts[6] > 0.95 * 8 * 4 * 2**20 / 100e6
        lab.set_rate("none")
        assert lab.measure().bandwidth_mbit > 200
        done = lab.run(
            [sys.executable, str(script), str(tmp_path), "fail"],
            timeout=60,
            env={"LAB_TEST": ""},
            capture=True,
        )
        assert done.returncode == 5, done.stdout
        # Not over the links any more: what took a third of a second was the rate.
        assert json.loads((tmp_path / "0").read_text())[6] < 0.2
    assert _nothing_of_ours()


def _running(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_a_job_is_ended_on_all_hosts_and_down_ends_the_rest(real: None) -> None:
    length = f"{10**6 + time.time_ns() % 10**6}"
    up = cli("up", "--rate", "none", "--slots", "2")
    assert up.returncode == 0, up.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(["sleep", length], timeout=3, capture=True)
    assert _running(length) == []
    process = subprocess.Popen([sys.executable, "-c", RUN, "lab", "run", "--", "sleep", length])
    try:
        deadline = time.monotonic() + 30
        while len(_running(length)) < 5:  # four ranks, and the words of the command line
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        assert _running(length) == []
    finally:
        process.kill()
    stray = subprocess.Popen(["ip", "netns", "exec", "greco1", "sleep", length])
    time.sleep(0.3)
    facts = json.loads(cli("status", "--json").stdout)
    assert facts["up"]
    assert [host["processes"] for host in facts["hosts"]] == [0, 1]
    assert cli("down").returncode == 0
    assert stray.wait(timeout=10) != 0
    assert cli("status").returncode == 1
    assert _nothing_of_ours()
