"""The command line, as a user calls it."""

import subprocess
import sys


def lora_mem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from lora_mem.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True)
