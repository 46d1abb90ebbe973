"""Create the virtual environment and install ppo_lab with its tests into it. `make` calls this.

Everything that can be missing is said in one line. It runs on the system's Python, before anything is installed, so it
uses the standard library only, and syntax that an old Python still reads far enough to say that it is too old.
"""

import argparse
import os
import shlex
import subprocess
import sys

NETWORK_SIGNS = ("ConnectionError", "NewConnectionError", "NameResolutionError", "Temporary failure", "timed out")


def stop(message):
    sys.exit("ppo_lab: " + message)


def check_python():
    if sys.version_info < (3, 11):
        stop("Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop("Python's venv module is missing: install it (Debian and Ubuntu: apt install python3-venv)")


def run_pip(python, arguments, log):
    """Run pip, append its output to a log, and say in one line why it failed."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with open(log, "a+") as out:
        print("$", shlex.join(command), file=out, flush=True)
        start = out.tell()
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        out.seek(start)
        output = out.read()
    if code == 0:
        return
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    if any(sign in output for sign in NETWORK_SIGNS):
        stop("the packages cannot be fetched, is there a network? (%s, log in %s)" % (errors[-1], log))
    stop("%s (log in %s)" % (errors[-1], log))


def constraints(torch, venv):
    """The pinned set; without its torch when another build was asked for."""
    if not torch:
        return "constraints.txt"
    path = os.path.join(venv, "constraints.txt")
    with open("constraints.txt") as pinned, open(path, "w") as out:
        out.writelines(line for line in pinned if not line.startswith("torch=="))
    return path


def main():
    check_python()
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--torch", default="", help="pip arguments that install another torch build")
    args = parser.parse_args()
    python = os.path.join(args.venv, "bin", "python")
    # pip comes last: an environment without it was left half made.
    if not os.path.exists(os.path.join(args.venv, "bin", "pip")):
        print("creating", args.venv, flush=True)
        if subprocess.run([sys.executable, "-m", "venv", args.venv]).returncode:
            stop("the virtual environment could not be created in " + args.venv)
    log = os.path.join(args.venv, "install.log")
    print("installing (one to ten minutes the first time; progress in %s)" % log, flush=True)
    if args.torch:
        run_pip(python, shlex.split(args.torch), log)
    run_pip(python, ["-c", constraints(args.torch, args.venv), "-e", ".[dev]"], log)
    # The first import lists all fonts, and its warning about that would count as a changed output of a notebook.
    subprocess.run([python, "-c", "import matplotlib.font_manager"], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted, the same command goes on from here")
