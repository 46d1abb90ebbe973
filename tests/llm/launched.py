"""What the tests of many ranks launch: several runs in one start, and judges and rewards that end a run their way."""

import json
import os
import signal
import sys
from itertools import count

from ppo_lab.llm import run as command

_calls = count()


def ending_judge(prompts, responses, finished):
    """A judge whose ENDS_AT-th call sends this process the signal ENDS_BY."""
    if next(_calls) == int(os.environ.get("ENDS_AT", -1)):
        os.kill(os.getpid(), int(signal.Signals[os.environ["ENDS_BY"]]))
    return {"length": [float(len(text.split())) for text in responses]}


def failing_reward(prompts, responses):
    """A reward that fails in its third call, on rank 1 alone."""
    if next(_calls) == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("the judge of rank 1 has left the court")
    return [float(len(text.split())) for text in responses]


def main() -> int:
    """Runs one after another: a list of lists of flags in the variable RUNS. Ends at the first that fails."""
    for flags in json.loads(os.environ["RUNS"]):
        if code := command.main(flags):
            print(f"exit code {code} of {flags}", file=sys.stderr)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
