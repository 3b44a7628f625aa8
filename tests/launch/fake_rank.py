"""Stands for `python -m meshwright train ...` in tests of the launcher: beats, steps, and ends as its script says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshwright.launch.pulse import start_pulse


def main():
    script = json.loads(Path(sys.argv[1]).read_text())
    pulse = start_pulse()
    rank, folder = pulse.rank, Path(script["folder"])
    attempt = len(list(folder.glob(f"attempt-*-{rank}"))) + 1
    (folder / f"attempt-{attempt}-{rank}").write_text(json.dumps(sys.argv[2:]))
    pulse.facts = {"run": str(folder / "run"), "mesh": "dp:2,fsdp:2", "minibatches": 1}
    pulse.step = 7
    pulse.flush()
    print(f"rank {rank} runs", flush=True)
    (folder / f"runs-{attempt}-{rank}").touch()
    while "--num-processes" in sys.argv and not (folder / f"runs-{attempt}-{1 - rank}").exists():
        time.sleep(0.01)  # both have started before one of them ends
    plan = script.get(f"{attempt}-{rank}", script["else"])
    if plan == "wait":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        time.sleep(60)
    elif plan == "traceback":
        raise ValueError("no such thing")
    elif plan == "leave a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (folder / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(plan)


if __name__ == "__main__":
    main()
