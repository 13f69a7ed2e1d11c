"""What a machine must have before anything is installed: a fit Python, g++, make, Python.h.

Part of ``bootstrap.py``; standard library only, syntax of Python 3.6. Each check fails within a
second, with the command that helps, instead of minutes later in a compiler's output.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST, NEWEST = (3, 10), (3, 12)

CPP_TEST = """
#include <iostream>
#include <optional>
#include <string_view>
#include <type_traits>
int main() {
  std::optional<std::string_view> word{"c++17"};
  if constexpr (std::is_same_v<int, int>) std::cout << *word << std::endl;
}
"""


class SetupError(Exception):
    """Something the user must put right; the message says what to type."""


def dotted(version):
    return ".".join(str(part) for part in version)


def run_quietly(command):
    """Exit code and combined output; 127 where the command cannot be started."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def find_python():
    """Path of a fit Python: this one, else a python3.12/3.11/3.10 on PATH that really runs.

    Raises:
        SetupError: there is none.
    """
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        # A pyenv shim exists for versions that are not active, and fails when run.
        if found and run_quietly([found, "-c", "import venv"])[0] == 0:
            return found
    raise SetupError(
        f"Python {dotted(sys.version_info[:3])} does not fit: this project needs Python "
        f"{dotted(OLDEST)} to {dotted(NEWEST)}, and PATH has no python3.12, python3.11 or "
        "python3.10 that runs.\n"
        "  Debian/Ubuntu:  sudo apt-get install python3.11 python3.11-dev   (or 3.10, 3.12)\n"
        "  elsewhere:      name one that fits: make setup PYTHON=/path/to/python3.11"
    )


def check_compiler():
    """Check that the C++ compiler compiles and links C++17; returns its name and version.

    Raises:
        SetupError: there is none, or it does not.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise SetupError(
            f"no C++ compiler: {compiler} is not on PATH. Horovod is compiled once, for the "
            "installed torch.\n  Debian/Ubuntu:  sudo apt-get install g++ make"
        )
    version = run_quietly([compiler, "--version"])[1].split("\n")[0].strip()
    with tempfile.TemporaryDirectory(prefix="hvd-greco-") as folder:
        source = os.path.join(folder, "test.cc")
        with open(source, "w") as handle:
            handle.write(CPP_TEST)
        program = os.path.join(folder, "test")
        code, output = run_quietly([compiler, "-std=c++17", source, "-o", program])
    if code != 0:
        raise SetupError(
            f"{compiler} ({version}) cannot compile and link a C++17 program, which torch's "
            "headers require; g++ 9 or newer can.\n"
            "  Debian/Ubuntu:             sudo apt-get install g++\n"
            "  a newer one beside it:     CXX=g++-12 make setup\n"
            f"The compiler said:\n{output[-1500:]}"
        )
    return version


def check_make():
    """Horovod's build runs make, also where this script was not started by it."""
    if shutil.which("make") is None:
        raise SetupError("make is not on PATH.\n  Debian/Ubuntu:  sudo apt-get install make")


def check_headers(include=None):
    """Check for Python.h of this Python, which Debian packs apart.

    Raises:
        SetupError: it is missing.
    """
    include = include or sysconfig.get_paths()["include"]
    if os.path.exists(os.path.join(include, "Python.h")):
        return
    version = dotted(sys.version_info[:2])
    raise SetupError(
        f"Python.h of Python {version} is missing (looked in {include}); Horovod's extension is "
        "compiled against it.\n"
        f"  Debian/Ubuntu:  sudo apt-get install python3-dev     (or python{version}-dev, if this "
        "is not the system's default Python)\n"
        "  Fedora/RHEL:    sudo dnf install python3-devel"
    )
